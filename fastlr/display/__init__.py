"""How results look: tables, plots, figures, notebooks."""
