"""Matrix products, with weights as they are or as levels of them."""
