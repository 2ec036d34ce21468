// Command queues of a launcher's own, beside PyTorch's stream. Their work is done when it is waited for, so that what
// is read earlier is seen to be missing; it is not among dispatches().
#include <utility>

#include "encoder.h"
#include "stream.h"

namespace metal_sim {
namespace {

using S = Selector;

struct OwnCommands : Object {
  OwnCommands();
  std::vector<Work> work;
  Encoder* encoder = nullptr;
  bool committed = false;
};

void commit(OwnCommands* self, S*) {
  if (self->committed) throw Fault("a command buffer is committed twice");
  if (self->encoder && !self->encoder->ended) throw Fault("a command buffer is committed before endEncoding");
  self->committed = true;
}

void wait(OwnCommands* self, S*) {
  if (!self->committed) throw Fault("waitUntilCompleted before commit: it would wait for ever");
  for (const Work& one : std::exchange(self->work, {})) {
    run_on_queue([&] { run(one); });
  }
}

Object* new_encoder(OwnCommands* self, S*) {
  if (self->encoder) throw Fault("a second encoder of one command buffer is not simulated");
  self->encoder = static_cast<Encoder*>(retain(new Encoder(&self->work)));
  return autorelease(self->encoder);
}

const ClassObject commands_class(
    "MTLCommandBuffer",
    {
        method("commit", &commit),
        method("waitUntilCompleted", &wait),
        method("computeCommandEncoder", &new_encoder),
        method(
            "error", +[](OwnCommands*, S*) -> Object* { return nullptr; }),
    },
    +[](Object* self) { release(static_cast<OwnCommands*>(self)->encoder); });
OwnCommands::OwnCommands() : Object(commands_class) {}

const ClassObject queue_class("MTLCommandQueue",
                              {
                                  method(
                                      "commandBuffer", +[](Object*, S*) { return autorelease(new OwnCommands); }),
                              });

}  // namespace

Object* new_queue() { return new Object(queue_class); }

}  // namespace metal_sim
