"""Files of other programs. Knows bytes and arrays; which parameter is called what is told by the caller."""
