// A document in curation, and a stage's verdict on it.
// A stage that looks at one document is a pure function of it and is called from many threads. A stage that looks at the whole
// corpus has three steps: sign (pure, from many threads), add (in the documents' order, by one thread), solve.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "../text/json_scan.h"

struct Document {
    std::string text;
    size_t source = 0;              // index of its name in --input
    int64_t number = 0;             // position in the whole input, from 0: the order of documents for any number of threads
    JsonFields fields;              // all other keys of its JSON line, or its other columns
    std::vector<std::string> more;  // further pieces, if a stage split it
    int copies = 1;                 // how often it is written
};

// Whether a document is kept; if not, the rule that dropped it and the measured value.
struct DocumentVerdict {
    bool keep = true;
    std::string rule, detail;  // "gopher-mean-word-length", "11.3 characters; allowed are 3 to 10"
};

// Changes in a document that a stage keeps: the rule and the number of places. The names live as long as the program.
using Changes = std::vector<std::pair<const char*, int64_t>>;
