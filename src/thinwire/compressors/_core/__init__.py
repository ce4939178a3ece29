"""The parts of compressors: the contract, segments and slots, specs, and the bases of families."""
