// A text classifier's file. If the input's first byte is odd, the file is the input after the first two bytes. Otherwise
// these two bytes are a number of weights, and the rest is a header, 0xff and a text; the weights are appended to the
// header, and the checksum is corrected, so that mutations reach the later checks. A loaded model must save to a file that
// gives the same probabilities.
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
