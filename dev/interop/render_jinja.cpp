// Renders Jinja templates, for comparison with transformers: for each line {"template": "...", "variables": {...}} of standard
// input a line {"text": "...", "spans": [[begin, end], ...]} with the bytes within {% generation %}, or {"error": "..."}.
//   build/cpu-bf16/render_jinja <PROGRAMS
#include <iostream>

#include "../../llmc/tokenizer/jinja.h"

int main() {
    for (std::string line; std::getline(std::cin, line);) {
        const auto in = nlohmann::ordered_json::parse(line);
        nlohmann::ordered_json out;
        try {
            const JinjaTemplate parsed(in["template"].get<std::string>());
            JinjaRendering rendering(parsed, 1700000000);
            for (const auto& [name, value] : in["variables"].items()) rendering.set(name.c_str(), rendering.json(value, 0));
            const JinjaString result = rendering.render();
            out["text"] = result.text;
            out["spans"] = nlohmann::ordered_json::array();
            size_t begin = 0;
            for (const JinjaString::Part& part : result.parts) {
                if (part.generated) out["spans"].push_back({begin, part.end});
                begin = part.end;
            }
        } catch (const Error& e) {
            out = {{"error", e.what()}};
        }
        std::cout << out.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) << "\n";
    }
}
