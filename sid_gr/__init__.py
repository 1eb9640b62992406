"""The semantic-ID generative model."""
