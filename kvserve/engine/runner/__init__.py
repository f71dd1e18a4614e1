"""One rank: a step's message carried out on the device."""
