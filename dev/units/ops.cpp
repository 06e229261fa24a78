// `make dev`: the unit of the ops. Declared in train_gpt.cu's unit (llmc/ops.inl), defined here. Inline functions that are not
// called in their unit are not emitted unless they are marked as used.
#include <condition_variable>
#include <fstream>
#include <functional>
#include <mutex>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>
#include <variant>

#include "../../llmc/ops.h"
#define inline inline __attribute__((used))
#include "../../llmc/cpu/ops.h"
