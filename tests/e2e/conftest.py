from tests.e2e.kept_ranks import kept_ranks  # noqa: F401  a fixture
