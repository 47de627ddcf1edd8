// Shapes, and other short lists of numbers that a call is described by.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <utility>
#include <vector>

namespace jaxfuse {

// A vector of int64_t. As long as it is short it lies in the object itself: a call makes some fifty of them, and half of the time of a
// small convolution went into their memory.
class Shape {
 public:
  using value_type = int64_t;
  using iterator = int64_t*;
  using const_iterator = const int64_t*;

  Shape() = default;
  explicit Shape(size_t size, int64_t value = 0) { std::fill_n(extended(size), size, value); }
  Shape(std::initializer_list<int64_t> values) : Shape(values.begin(), values.end()) {}
  template <class Iterator, class = decltype(*std::declval<Iterator>())>
  Shape(Iterator first, Iterator last) { std::copy(first, last, extended(last - first)); }
  Shape(const Shape& other) : Shape(other.begin(), other.end()) {}
  Shape(Shape&& other) noexcept { swap(other); }
  Shape& operator=(Shape other) noexcept {
    swap(other);
    return *this;
  }
  operator std::vector<int64_t>() const { return {begin(), end()}; }

  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  int64_t* data() { return far_ ? far_.get() : near_; }
  const int64_t* data() const { return far_ ? far_.get() : near_; }
  iterator begin() { return data(); }
  iterator end() { return data() + size_; }
  const_iterator begin() const { return data(); }
  const_iterator end() const { return data() + size_; }
  int64_t& operator[](size_t i) { return data()[i]; }
  const int64_t& operator[](size_t i) const { return data()[i]; }
  int64_t& back() { return data()[size_ - 1]; }
  const int64_t& back() const { return data()[size_ - 1]; }

  void push_back(int64_t value) { *extended(1) = value; }
  template <class Iterator>
  void insert(const_iterator before, Iterator first, Iterator last) {
    const size_t place = before - begin();
    std::copy(first, last, extended(last - first));
    std::rotate(begin() + place, end() - (last - first), end());
  }
  void insert(const_iterator before, std::initializer_list<int64_t> values) { insert(before, values.begin(), values.end()); }
  void insert(const_iterator before, int64_t value) { insert(before, {value}); }
  void erase(const_iterator first, const_iterator last) {
    std::copy(last, const_iterator(end()), begin() + (first - begin()));
    size_ -= last - first;
  }

  friend bool operator==(const Shape& a, const Shape& b) { return std::equal(a.begin(), a.end(), b.begin(), b.end()); }
  friend bool operator!=(const Shape& a, const Shape& b) { return !(a == b); }

 private:
  static constexpr size_t kNear = 6;

  void swap(Shape& other) noexcept {
    std::swap(near_, other.near_);
    std::swap(far_, other.far_);
    std::swap(size_, other.size_);
    std::swap(capacity_, other.capacity_);
  }

  // `more` elements behind the last, which are to be written.
  int64_t* extended(size_t more) {
    if (size_ + more > capacity_) {
      const size_t capacity = std::max(size_ + more, 2 * capacity_);
      std::unique_ptr<int64_t[]> moved(new int64_t[capacity]);
      std::copy(begin(), end(), moved.get());
      far_ = std::move(moved), capacity_ = capacity;
    }
    return data() + std::exchange(size_, size_ + more);
  }

  int64_t near_[kNear] = {};
  size_t size_ = 0, capacity_ = kNear;
  std::unique_ptr<int64_t[]> far_;
};

}  // namespace jaxfuse
