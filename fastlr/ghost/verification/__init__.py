"""What is proven, compared and audited before a number is given."""
