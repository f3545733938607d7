"""The ops that models are made of, one a file, each with its plain torch reference."""
