"""Every op in plain torch: the definition, with the same name and signature as its fast twins."""
