// A text classifier's file. The input begins with two bytes. If the first is odd, the rest is the file as it stands; else they
// are a number, and the rest is a header, 0xff and a text: so many bytes of weights go behind the header, and the checksum is
// made to fit, so that mutations reach the checks behind it. What was loaded must save to a file that gives the same
// probabilities.
#include "fuzz.h"

#include "../../llmc/curate/text_classifier.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const Files files;
    std::string_view input = view(data, size);
    const size_t low = read_byte(input), n_weights = low / 2 + 128 * (size_t)read_byte(input);
    std::string file(input);
    std::string_view text = input;
    if (low % 2 == 0) {
        const std::string_view header = read_until(text, (char)0xff);
        const uint32_t header_bytes = (uint32_t)header.size();
        std::string body((const char*)&header_bytes, 4);
        body += header;
        for (size_t i = 0; i < n_weights; i++) body += (char)(i * 151 + 7);
        const uint32_t checksum = crc32c(body.data(), body.size());
        file = "TGPTCLS1" + std::string((const char*)&checksum, 4) + body;
    }
    refused([&] {
        const TextClassifier classifier = TextClassifier::from_bytes(file, "the input");
        float sum = 0;
        for (const float p : classifier.probabilities(text)) sum += p;
        CHECK(sum > 0.99f && sum < 1.01f, "the probabilities add up to %g", (double)sum);
        classifier.save(files / "saved");
        const TextClassifier again = TextClassifier::load(files / "saved");
        CHECK(again.probabilities(text) == classifier.probabilities(text), "a model that was saved says something else");
    });
    return 0;
}
