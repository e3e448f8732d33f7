from tests.support.one_thread import one_thread  # noqa: F401 - a fixture
