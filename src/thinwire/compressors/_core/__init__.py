"""What compressors are made of: the contract, segments and slots, specs, and the bases of families."""
