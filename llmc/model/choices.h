// The choices of the block: one table per enum (activations are in shapes.h), with the word of the command line, the word of
// config.json (of model_type "train_gpt"), and the words of the plan and the report.
#pragma once
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "../base/enum_table.h"
#include "model_config.h"

template <class Enum>
struct Choice {
    Enum value;
    const char *option, *in_config, *title;
};

inline constexpr Choice<Norm> choices_of_norm[] = {{Norm::layernorm, "LayerNorm", "layernorm", "LayerNorm"},
                                                   {Norm::rmsnorm, "RMSNorm", "rmsnorm", "RMSNorm"}};
inline constexpr Choice<NormPlace> choices_of_norm_place[] = {
    {NormPlace::before, "before", "before", ""},
    {NormPlace::after, "after", "after", " after attention and MLP"},
    {NormPlace::both, "both", "both", " before and after attention and MLP"},
    {NormPlace::parallel, "parallel", "parallel", ", attention and MLP side by side"},
    {NormPlace::shared, "shared", "shared", ", attention and MLP side by side after one norm"}};
inline constexpr Choice<QkNorm> choices_of_qk_norm[] = {{QkNorm::none, "", "none", ""},
                                                        {QkNorm::head, "", "head", "norms of query and key heads"},
                                                        {QkNorm::whole, "", "whole", "norms of queries and keys"}};
inline constexpr Choice<Position> choices_of_position[] = {
    {Position::learned, "learned_absolute", "learned", "learned positions"},
    {Position::rope, "rope", "rope", "rotary positions"},
    {Position::alibi, "alibi", "alibi", "ALiBi"},
    {Position::none, "none", "none", "no positions"}};
inline constexpr Choice<RopeScaling::Type> choices_of_rope_scaling[] = {
    {RopeScaling::Type::none, "none", "default", "none"},
    {RopeScaling::Type::linear, "linear", "linear", "linear"},
    {RopeScaling::Type::dynamic, "dynamic", "dynamic", "dynamic"},
    {RopeScaling::Type::yarn, "yarn", "yarn", "YaRN"},
    {RopeScaling::Type::llama3, "llama3", "llama3", "Llama 3"},
    {RopeScaling::Type::longrope, "longrope", "longrope", "LongRoPE"}};
static_assert(is_table_of<RopeScaling::Type>(choices_of_rope_scaling));
static_assert(is_table_of<Norm>(choices_of_norm));
static_assert(is_table_of<NormPlace>(choices_of_norm_place));
static_assert(is_table_of<QkNorm>(choices_of_qk_norm));
static_assert(is_table_of<Position>(choices_of_position));

// The words of --OPTION, for its allowed values.
template <class Rows>
std::vector<std::string> option_words(const Rows& rows) {
    std::vector<std::string> words;
    for (const auto& row : rows) words.push_back(row.option);
    return words;
}
// The words of config.json, with their values.
template <class Rows>
auto config_words(const Rows& rows) {
    std::vector<std::pair<const char*, std::decay_t<decltype(rows[0].value)>>> words;
    for (const auto& row : rows) words.emplace_back(row.in_config, row.value);
    return words;
}
