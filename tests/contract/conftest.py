# A package of its own with a test of its own; test_outside_rule.py installs it and runs that.
collect_ignore = ["outside_rule"]
