import a_package_that_nobody_has  # noqa: F401


def open_needy(location, *, mode="r"):
    raise AssertionError
