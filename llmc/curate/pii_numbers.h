// Numbers of bank accounts and of persons, which have checksums:
//   iban   two letters of a country, two check digits (ISO 7064, modulo 97), and as many characters as the country has
//   id     of the state. By their form and checksum alone: the United States (SSN, 3-2-4 digits), the United Kingdom (NINO),
//          France (NIR), Spain (DNI, NIE), Italy (codice fiscale), Brazil (CPF), China (18 digits), South Korea (6-7 digits),
//          Mexico (CURP), India (Aadhaar, 4-4-4 digits). Where many numbers have the form, also by a word before: Canada (SIN),
//          Germany (Steuer-ID), the Netherlands (BSN), Poland (PESEL), Japan (My Number), Sweden (personnummer), Turkey, the US
//          written with spaces
#pragma once
#include <array>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <string>
#include <string_view>

#include "pii_text.h"

namespace pii {

inline bool has_luhn_checksum(const std::string& digits) {
    int sum = 0;
    for (size_t i = 0; i < digits.size(); i++) {
        int d = digits[digits.size() - 1 - i] - '0';
        if (i % 2 == 1) d = d < 5 ? 2 * d : 2 * d - 9;
        sum += d;
    }
    return sum % 10 == 0;
}
// Letters count from A = 10.
inline int modulo_97(std::string_view text) {
    int rest = 0;
    for (const char c : text) rest = is_digit_character(c) ? (10 * rest + c - '0') % 97 : (100 * rest + c - 'A' + 10) % 97;
    return rest;
}

// ---- bank accounts: called at a capital letter that starts a word -----------------------------------------------------------
inline int iban_length(std::string_view country) {
    static constexpr std::string_view lengths =
        "AD24 AE23 AL28 AT20 AZ28 BA20 BE16 BG22 BH22 BR29 BY28 CH21 CR22 CY28 CZ24 DE22 DK18 DO28 EE20 EG29 "
        "ES24 FI18 FO18 FR27 GB22 GE22 GI23 GL18 GR27 GT28 HR21 HU28 IE22 IL23 IQ23 IS26 IT27 JO30 KW30 KZ20 "
        "LB28 LC32 LI21 LT20 LU20 LV21 LY25 MC27 MD24 ME22 MK19 MR27 MT31 MU30 NL18 NO15 PK24 PL28 PS29 PT25 "
        "QA29 RO24 RS22 SA24 SC31 SE24 SI19 SK24 SM27 ST25 SV28 TL23 TN24 TR26 UA29 VA22 VG24 XK20";
    for (size_t at = 0; at < lengths.size(); at += 5)
        if (lengths.substr(at, 2) == country) return atoi(std::string(lengths.substr(at + 2, 2)).c_str());
    return 0;
}
inline bool find_iban(const Text& t, size_t begin, Found& found) {
    if (!is_upper(t[begin]) || !is_upper(t[begin + 1]) || !is_digit_character(t[begin + 2]) ||
        !is_digit_character(t[begin + 3]))
        return false;
    const auto length = (size_t)iban_length(t.s.substr(begin, 2));
    std::string digits;
    size_t at = begin;
    while (digits.size() < length) {
        if (is_digit_character(t[at]) || is_upper(t[at])) digits += t[at++];
        else if ((t[at] == ' ' || t[at] == '-') && digits.size() >= 2 && is_alnum(t[at + 1])) at++;
        else return false;
    }
    if (length == 0 || is_word(t[at])) return false;
    if (modulo_97(digits.substr(4) + digits.substr(0, 4)) != 1) return false;
    found = {"iban", begin, at};
    return true;
}

// ---- numbers of the state ---------------------------------------------------------------------------------------------------
// The text at `begin` in a form: 9 a digit, A a capital letter, X one of both, ? a space, hyphen or nothing, other characters
// themselves. Returns the end, 0 if it has not the form; `plain` gets the letters and digits.
inline size_t matches(const Text& t, size_t begin, std::string_view form, std::string& plain) {
    plain.clear();
    size_t at = begin;
    for (const char f : form) {
        const char c = t[at];
        if (f == '?') {
            at += c == ' ' || c == '-';
            continue;
        }
        const bool fits = f == '9'   ? is_digit_character(c)
                          : f == 'A' ? is_upper(c)
                          : f == 'X' ? is_digit_character(c) || is_upper(c)
                                     : c == f;
        if (!fits) return 0;
        if (is_alnum(c)) plain += c;
        at++;
    }
    const bool goes_on = is_word(t[at]) || (t[at] == '-' && is_alnum(t[at + 1])) ||
                         ((t[at] == '.' || t[at] == ',') && is_digit_character(t[at + 1]));
    return goes_on ? 0 : at;
}
inline bool is_date(int month, int day) { return month >= 1 && month <= 12 && day >= 1 && day <= 31; }
inline int number_in(const std::string& digits, size_t at, size_t n) { return atoi(digits.substr(at, n).c_str()); }
inline int weighted_sum(const std::string& digits, std::initializer_list<int> weights) {
    int sum = 0;
    size_t i = 0;
    for (const int weight : weights) sum += weight * (digits[i++] - '0');
    return sum;
}

inline bool is_ssn(const std::string& d) {
    const int area = number_in(d, 0, 3);
    return area > 0 && area != 666 && area < 900 && number_in(d, 3, 2) > 0 && number_in(d, 5, 4) > 0 && d != "123456789" &&
           d != "078051120" && d != "219099999";
}
inline bool is_cpf(const std::string& d) {
    if (d.find_first_not_of(d[0]) == std::string::npos) return false;
    const int first = weighted_sum(d, {10, 9, 8, 7, 6, 5, 4, 3, 2}) * 10 % 11 % 10;
    const int second = weighted_sum(d, {11, 10, 9, 8, 7, 6, 5, 4, 3, 2}) * 10 % 11 % 10;
    return first == d[9] - '0' && second == d[10] - '0';
}
inline bool is_nino(const std::string& p) {
    const std::string prefix = p.substr(0, 2);
    for (const char* never : {"BG", "GB", "NK", "KN", "TN", "NT", "ZZ"})
        if (prefix == never) return false;
    return !strchr("DFIQUV", p[0]) && !strchr("DFIOQUV", p[1]) && p[8] >= 'A' && p[8] <= 'D';
}
inline bool is_nir(const std::string& d) {  // of France: sex, year, month, department, ..., key
    const int month = number_in(d, 3, 2);
    if ((d[0] != '1' && d[0] != '2') || month < 1 || (month > 12 && month < 20) || (month > 42 && month < 50)) return false;
    const uint64_t number = strtoull(d.substr(0, 13).c_str(), nullptr, 10);
    return 97 - (int)(number % 97) == number_in(d, 13, 2);
}
inline bool is_dni(const std::string& p) {  // eight digits, or X, Y or Z and seven
    std::string digits = p.substr(0, 8);
    if (!is_digit_character(p[0])) digits[0] = (char)('0' + (p[0] - 'X'));
    return (is_digit_character(p[0]) || p[0] >= 'X') && "TRWAGMYFPDXBNJZSQVHLCKE"[number_in(digits, 0, 8) % 23] == p[8];
}
inline bool is_codice_fiscale(const std::string& p) {
    static constexpr int odd[] = {1, 0, 5, 7, 9, 13, 15, 17, 19, 21, 2, 4, 18, 20, 11, 3, 6, 8, 12, 14, 16, 10, 22, 25, 24, 23};
    int sum = 0;
    for (size_t i = 0; i < 15; i++) {
        const int value = is_digit_character(p[i]) ? p[i] - '0' : p[i] - 'A';
        sum += i % 2 == 0 ? odd[value] : value;
    }
    return 'A' + sum % 26 == p[15] && strchr("ABCDEHLMPRST", p[8]);
}
inline bool is_chinese_id(const std::string& p) {
    if (!is_date(number_in(p, 10, 2), number_in(p, 12, 2)) || number_in(p, 6, 4) < 1900 || number_in(p, 6, 4) > 2100)
        return false;
    const int sum = weighted_sum(p, {7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2});
    return "10X98765432"[sum % 11] == p[17];
}
inline bool is_korean_id(const std::string& d) {
    return is_date(number_in(d, 2, 2), number_in(d, 4, 2)) && d[6] >= '1' && d[6] <= '8';
}
inline bool is_curp(const std::string& p) {
    if (!strchr("HMX", p[10]) || !is_date(number_in(p, 6, 2), number_in(p, 8, 2)) || !is_digit_character(p[17])) return false;
    int sum = 0;
    for (int i = 0; i < 17; i++) {
        const char c = p[(size_t)i];
        const int value = is_digit_character(c) ? c - '0' : c - 'A' + (c > 'N' ? 11 : 10);  // Ñ is between N and O
        sum += value * (18 - i);
    }
    return (10 - sum % 10) % 10 == p[17] - '0';
}
inline bool is_aadhaar(const std::string& d) {  // Verhoeff's checksum
    static constexpr int permuted[8][10] = {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, {1, 5, 7, 6, 2, 8, 3, 0, 9, 4},
                                            {5, 8, 0, 3, 7, 9, 6, 1, 4, 2}, {8, 9, 1, 6, 0, 4, 3, 5, 2, 7},
                                            {9, 4, 5, 3, 1, 2, 6, 8, 7, 0}, {4, 2, 8, 6, 5, 7, 3, 9, 0, 1},
                                            {2, 7, 9, 3, 8, 0, 6, 4, 1, 5}, {7, 0, 4, 6, 9, 1, 3, 2, 5, 8}};
    const auto product = [](int a, int b) {  // in the dihedral group of ten elements
        const int turned = a < 5 ? (b < 5 ? a + b : a + b - 5) : (b < 5 ? a - 5 - b : a - b);
        const int rest = (turned % 5 + 5) % 5;
        return (a < 5) == (b < 5) ? rest : rest + 5;
    };
    int sum = 0;
    for (int i = 0; i < 12; i++) sum = product(sum, permuted[i % 8][d[(size_t)(11 - i)] - '0']);
    return sum == 0 && d[0] >= '2';
}
inline bool is_pesel(const std::string& d) {
    return is_date(number_in(d, 2, 2) % 20, number_in(d, 4, 2)) &&
           (10 - weighted_sum(d, {1, 3, 7, 9, 1, 3, 7, 9, 1, 3}) % 10) % 10 == d[10] - '0';
}
inline bool is_bsn(const std::string& d) { return weighted_sum(d, {9, 8, 7, 6, 5, 4, 3, 2, -1}) % 11 == 0 && d != "000000000"; }
inline bool is_my_number(const std::string& d) {
    const int rest = weighted_sum(d, {6, 5, 4, 3, 2, 7, 6, 5, 4, 3, 2}) % 11;
    return (rest <= 1 ? 0 : 11 - rest) == d[11] - '0';
}
inline bool is_steuer_id(const std::string& d) {
    int product = 10;
    for (size_t i = 0; i < 10; i++) {
        const int sum = (d[i] - '0' + product) % 10;
        product = 2 * (sum == 0 ? 10 : sum) % 11;
    }
    return (11 - product) % 10 == d[10] - '0' && d[0] != '0';
}
inline bool is_personnummer(const std::string& d) {
    const std::string ten = d.substr(d.size() - 10);
    return is_date(number_in(ten, 2, 2), number_in(ten, 4, 2)) && has_luhn_checksum(ten);
}
inline bool is_turkish_id(const std::string& d) {
    const int odd = weighted_sum(d, {1, 0, 1, 0, 1, 0, 1, 0, 1}), even = weighted_sum(d, {0, 1, 0, 1, 0, 1, 0, 1});
    return d[0] != '0' && ((7 * odd - even) % 10 + 10) % 10 == d[9] - '0' && (odd + even + d[9] - '0') % 10 == d[10] - '0';
}

// Called at a letter or digit that starts a word.
inline bool find_id(const Text& t, size_t begin, Found& found) {
    using Words = std::initializer_list<const char*>;
    static constexpr Words ssn = {"ssn", "social security"};
    static constexpr Words social_insurance = {"sin", "social insurance", "assurance sociale", "nas"};
    static constexpr Words bsn = {"bsn", "burgerservicenummer", "sofinummer"};
    static constexpr Words personnummer = {"personnummer", "personal number", "pnr", "personnr"};
    static constexpr Words my_number = {"my number", "マイナンバー", "個人番号"};
    static constexpr Words steuer_id = {
        "steuer-id", "steueridentifikationsnummer", "identifikationsnummer", "steuer-idnr", "idnr", "tin"};
    std::string plain;
    size_t end = 0;
    const auto has = [&](std::string_view form, bool (*check)(const std::string&)) {
        end = matches(t, begin, form, plain);
        return end > 0 && check(plain);
    };
    const auto near = [&](Words words) { return t.has_before(begin, words); };
    bool is = false;
    if (is_digit_character(t[begin])) {
        if (begin > 1 && strchr(".,-/+", t[begin - 1]) && is_alnum(t[begin - 2])) return false;
        size_t group = begin;  // the end of the first group of digits, by which forms are chosen
        while (is_digit_character(t[group]) && group - begin < 19) group++;
        switch (group - begin) {
            case 1: is = has("9?99?99?99?999?999?99", is_nir); break;
            case 2: is = has("99?999?999?999", is_steuer_id) && near(steuer_id); break;
            case 3:
                is = has("999-99-9999", is_ssn) || has("999.999.999-99", is_cpf) || (has("999 99 9999", is_ssn) && near(ssn)) ||
                     (has("999?999?999", has_luhn_checksum) && near(social_insurance));
                break;
            case 4:
                is = has("9999 9999 9999", is_aadhaar) || has("9999-9999-9999", is_aadhaar) ||
                     (has("9999?99?999", is_bsn) && near(bsn)) || (has("9999?9999?9999", is_my_number) && near(my_number));
                break;
            case 6:
                is = has("999999-9999999", is_korean_id) || (has("999999-9999", is_personnummer) && near(personnummer));
                break;
            case 8: is = has("99999999?A", is_dni) || (has("99999999-9999", is_personnummer) && near(personnummer)); break;
            case 9:
                is = (has("999999999", is_ssn) && near(ssn)) ||
                     (has("999999999", has_luhn_checksum) && near(social_insurance)) || (has("999999999", is_bsn) && near(bsn));
                break;
            case 11:
                is = (has("99999999999", is_cpf) && near({"cpf"})) || (has("99999999999", is_pesel) && near({"pesel"})) ||
                     (has("99999999999", is_steuer_id) && near(steuer_id)) ||
                     (has("99999999999", is_turkish_id) && near({"kimlik", "tckn", "t.c."}));
                break;
            case 12:
                is = (has("999999999999", is_aadhaar) && near({"aadhaar", "aadhar", "uid"})) ||
                     (has("999999999999", is_my_number) && near(my_number));
                break;
            case 15: is = has("999999999999999", is_nir); break;
            case 17:
            case 18: is = has("99999999999999999X", is_chinese_id); break;
            default: break;
        }
    } else if (is_upper(t[begin])) {
        is = has("AA?99?99?99?A", is_nino) || has("AAAAAA99A99A999A", is_codice_fiscale) ||
             has("AAAA999999AAAAAAX9", is_curp) || has("A?9999999?A", is_dni);
    }
    if (is) found = {"id", begin, end};
    return is;
}

}  // namespace pii
