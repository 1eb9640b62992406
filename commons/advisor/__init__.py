"""What balancing would gain on given sequence lengths, before anyone switches it on."""
