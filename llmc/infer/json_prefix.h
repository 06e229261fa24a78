// Whether bytes are the start of a JSON object (RFC 8259), byte by byte: with response_format json_object, `train_gpt serve`
// draws only tokens that keep the text valid. Narrower than the standard where a model could write endlessly or parsers differ:
// at most 32 brackets deep, 32 bytes of white space in a row, numbers of 20 characters with exponents of two digits, no
// surrogates as escapes. Strings are UTF-8.
#pragma once
#include <cctype>
#include <cstring>
#include <string_view>

class JsonPrefix {
public:
    // False: no object starts like this; the state is then unspecified.
    bool add(std::string_view bytes) {
        for (const char c : bytes)
            if (!add((unsigned char)c)) return false;
        return true;
    }
    bool complete() const { return begun_ && depth_ == 0; }

private:
    enum class State : char {
        value,
        first_value,
        first_key,
        key,
        colon,
        after,  // outside of strings and numbers
        string,
        escape,
        hex,
        literal,  // within
        minus,
        zero,
        integer,
        point,
        fraction,
        exponent,
        exponent_sign,
        exponent_digit,
        last_digit  // the last of a number
    };
    static constexpr int most_depth = 32, most_space = 32, most_of_number = 20;

    bool add(unsigned char c) {
        if (complete()) return false;
        if (state_ == State::string) return in_string(c);
        if (state_ >= State::minus) return in_number(c);
        if (state_ == State::escape) {
            state_ = c == 'u' ? State::hex : State::string;
            count_ = 0;
            return strchr("\"\\/bfnrtu", c) && c;
        }
        if (state_ == State::hex) {
            const bool surrogate = count_ == 1 && (last_ == 'd' || last_ == 'D') && c >= '8';
            last_ = c;
            if (++count_ == 4) {
                state_ = State::string;
                count_ = 0;
            }
            return isxdigit(c) && !surrogate;
        }
        if (state_ == State::literal) {
            if (c != (unsigned char)*rest_++) return false;
            if (!*rest_) state_ = State::after;
            return true;
        }
        if (c == ' ' || c == '\n' || c == '\t' || c == '\r') return ++count_ <= most_space;
        count_ = 0;
        return in_structure(c);
    }
    bool in_structure(unsigned char c) {
        switch (state_) {
            case State::first_value:
                if (c == ']') return close('[');
                [[fallthrough]];
            case State::value: return begin_value(c);
            case State::first_key:
                if (c == '}') return close('{');
                [[fallthrough]];
            case State::key:
                is_key_ = true;
                state_ = State::string;
                return c == '"';
            case State::colon: state_ = State::value; return c == ':';
            default:
                if (c == '}') return close('{');
                if (c == ']') return close('[');
                state_ = open_[depth_ - 1] == '{' ? State::key : State::value;
                return c == ',';
        }
    }
    bool begin_value(unsigned char c) {
        if (c == '{' || (c == '[' && depth_ > 0)) {
            if (depth_ == most_depth) return false;
            open_[depth_++] = (char)c;
            begun_ = true;
            state_ = c == '{' ? State::first_key : State::first_value;
            return true;
        }
        if (depth_ == 0) return false;
        is_key_ = false;
        count_ = 1;
        for (const char* word : {"true", "false", "null"})
            if (c == (unsigned char)*word) {
                rest_ = word + 1;
                state_ = State::literal;
                return true;
            }
        state_ = c == '"' ? State::string : c == '-' ? State::minus : c == '0' ? State::zero : State::integer;
        if (c == '"') count_ = 0;
        return c == '"' || c == '-' || isdigit(c);
    }
    bool close(char bracket) {
        state_ = State::after;
        return open_[--depth_] == bracket;
    }
    // count_: bytes that a character still lacks; least_, most_: bounds of the next one (Unicode 15, table 3-7).
    bool in_string(unsigned char c) {
        if (count_ > 0) {
            const bool good = c >= least_ && c <= most_;
            count_--;
            least_ = 0x80;
            most_ = 0xbf;
            return good;
        }
        if (c == '"') state_ = is_key_ ? State::colon : State::after;
        if (c == '\\') state_ = State::escape;
        count_ = c < 0xc0 ? 0 : c < 0xe0 ? 1 : c < 0xf0 ? 2 : 3;
        least_ = c == 0xe0 ? 0xa0 : c == 0xf0 ? 0x90 : 0x80;
        most_ = c == 0xed ? 0x9f : c == 0xf4 ? 0x8f : 0xbf;
        return c >= 0x20 && (c < 0x80 || (c >= 0xc2 && c <= 0xf4));
    }
    bool in_number(unsigned char c) {
        const bool digit = isdigit(c), ends = state_ != State::minus && state_ != State::point && state_ != State::exponent &&
                                              state_ != State::exponent_sign;
        State next = State::after;
        if (state_ == State::minus && digit) next = c == '0' ? State::zero : State::integer;
        else if (state_ == State::integer && digit) next = State::integer;
        else if ((state_ == State::zero || state_ == State::integer) && c == '.') next = State::point;
        else if ((state_ == State::point || state_ == State::fraction) && digit) next = State::fraction;
        else if (ends && state_ < State::exponent && (c == 'e' || c == 'E')) next = State::exponent;
        else if (state_ == State::exponent && (c == '-' || c == '+')) next = State::exponent_sign;
        else if ((state_ == State::exponent || state_ == State::exponent_sign) && digit) next = State::exponent_digit;
        else if (state_ == State::exponent_digit && digit) next = State::last_digit;
        state_ = next;
        if (next != State::after) return ++count_ <= most_of_number;
        count_ = 0;
        return ends && add(c);
    }

    State state_ = State::value;
    bool begun_ = false, is_key_ = false;
    char open_[most_depth] = {};
    unsigned char last_ = 0, least_ = 0, most_ = 0;
    int depth_ = 0, count_ = 0;
    const char* rest_ = "";
};
