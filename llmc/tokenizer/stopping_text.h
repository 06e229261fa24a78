// A text that arrives token by token and ends before any of `stops`.
#pragma once
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "../base/text.h"

// Outputs only final text: no partial character, and no possible start of a stop.
class StoppingText {
public:
    explicit StoppingText(std::vector<std::string> stops) : stops_(std::move(stops)) {}

    // Returns true if the text has reached a stop.
    bool add(const std::string& bytes) {
        pending_ += bytes;
        size_t stop = std::string::npos;
        for (const std::string& s : stops_) stop = std::min(stop, pending_.find(s));
        if (stop == std::string::npos) return false;
        pending_.resize(stop);
        ended_ = true;
        return true;
    }
    void end() { ended_ = true; }
    // The text since the last call.
    std::string take() {
        size_t certain = pending_.size();
        if (!ended_) {
            for (const std::string& s : stops_)
                for (size_t n = std::min(s.size() - 1, pending_.size()); n > 0; n--)
                    if (pending_.compare(pending_.size() - n, n, s, 0, n) == 0) {
                        certain = std::min(certain, pending_.size() - n);
                        break;
                    }
            certain = whole_characters(pending_.substr(0, certain));
        }
        const std::string taken = pending_.substr(0, certain);
        pending_.erase(0, certain);
        return taken;
    }

private:
    std::vector<std::string> stops_;
    std::string pending_;
    bool ended_ = false;
};
