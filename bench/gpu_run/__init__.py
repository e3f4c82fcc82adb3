"""Everything that fastlr measures on a GPU, in commands of ten minutes that resume each other."""
