// A document in curation, and what a stage says about it.
// A stage that looks at one document is a pure function of it and is called from many threads. A stage that looks at the whole
// corpus has three steps: sign (pure, from many threads), add (in the documents' order, by one thread), solve.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "../data/json_scan.h"

struct Document {
    std::string text;
    size_t source = 0;              // which of the names given to --input it comes from
    int64_t number = 0;             // position in the whole input, from 0: the order of documents whatever the threads
    JsonFields fields;              // all other keys of its JSON line, or its other columns
    std::vector<std::string> more;  // pieces that a stage cut it into, beside `text`
    int copies = 1;                 // how often it is written
};

// Whether a document is kept; if not, by which rule it was dropped and what was measured.
struct DocumentVerdict {
    bool keep = true;
    std::string rule, detail;  // "gopher-mean-word-length", "11.3 characters; allowed are 3 to 10"
};

// What a stage changed in a document that it keeps: the rule and the number of places. The names live as long as the program.
using Changes = std::vector<std::pair<const char*, int64_t>>;
