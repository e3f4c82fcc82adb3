"""fastlr's tests."""
