"""The page that is generated from the comments in the headers of C++ programs."""

from __future__ import annotations

from tools import cpp_reference


def test_the_page_is_that_of_the_headers() -> None:
    assert cpp_reference.PAGE.read_text() == cpp_reference.page(), "write it: python -m tools.cpp_reference"


def test_declarations_are_listed_without_their_bodies() -> None:
    header = """
/// A thing.
class Thing {
 public:
  /// Makes it.
  explicit Thing(int size = f(3)) : size_(size) {}
  /// Whether it is
  /// large.
  template <class T>
  bool is_large(T than, Options options = {}) const { return size_ > than; }
  int hidden();
  int size_;  // bytes
};
/// Kinds.
enum class Kind { one = 1, two = 2 };
"""
    assert [(entry.code, entry.text) for entry in cpp_reference.entries(header)] == [
        ("class Thing", "A thing."),
        ("Thing(int size = f(3))", "Makes it."),
        ("template <class T> bool is_large(T than, Options options = {}) const", "Whether it is\nlarge."),
        ("enum class Kind { one = 1, two = 2 }", "Kinds."),
    ]
