"""The benchmark of models that pad a rank's rows to the longest of them."""
