// Tables with one row per value of an enum, in its order, checked by the compiler: a value that is added without its row is an
// error, not a read past the table's end.
//   constexpr ColorRow rows[] = {{Color::red, "red"}, {Color::green, "green"}};
//   static_assert(is_table_of<Color>(rows));
//   row_of(rows, color).word
// Values are counted from 0 to the first one without a name, which a compiler prints in __PRETTY_FUNCTION__ as a cast.
#pragma once
#include <cstddef>
#include <iterator>
#include <type_traits>
#include <string_view>

namespace detail {

template <auto value>
constexpr bool has_name() {
    constexpr std::string_view text = __PRETTY_FUNCTION__;  // "... value = Color::red]", or "... value = (Color)2]"
    const size_t equals = text.rfind("value = ");
    return equals != text.npos && text[equals + 8] != '(' && !(text[equals + 8] >= '0' && text[equals + 8] <= '9');
}

}  // namespace detail

template <class Enum, size_t n = 0>
constexpr size_t number_of_values() {
    if constexpr (detail::has_name<(Enum)n>()) return number_of_values<Enum, n + 1>();
    else return n;
}

// Each row's first member, `value`, is the enum's.
template <class Enum, class Rows>
constexpr bool is_table_of(const Rows& rows) {
    if (std::size(rows) != number_of_values<Enum>()) return false;
    for (size_t i = 0; i < std::size(rows); i++)
        if (rows[i].value != (Enum)i) return false;
    return true;
}

template <class Rows, class Enum, class = std::enable_if_t<std::is_enum_v<Enum>>>
constexpr const auto& row_of(const Rows& rows, Enum value) {
    return rows[(size_t)value];
}
