// `make dev`: the unit of the commands that need no model. Declared in train_gpt.cu's unit, defined here.
#include "../../llmc/commands/host_commands.h"

const HostCommands* dev_host_commands() { return &host_commands; }  // without a use, an inline variable is not emitted
