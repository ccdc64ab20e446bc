// A rank of cpp_ddp.py: times the steps of a model alone, with its gradients copied, and with
// shoal::DistributedDataParallel.
//
//   cpp_ddp SECONDS FOLDER     writes FOLDER/RANK.json, in the format of training_rank.py
//
// The model is the task "layers" of training_models.py: 200 linear layers of 64, each followed by a ReLU.
#include <shoal/torch.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace nn = torch::nn;
using at::Tensor;

namespace {

constexpr int kLayers = 200, kWidth = 64, kBatch = 32;
constexpr int kStepsOfATurn = 20;

nn::Sequential make_model() {
  torch::manual_seed(0);
  nn::Sequential chain;
  for (int layer = 0; layer < kLayers; ++layer) {
    nn::Linear linear(kWidth, kWidth);
    nn::init::orthogonal_(linear->weight, std::sqrt(2.0));
    chain->push_back(linear);
    chain->push_back(nn::ReLU());
  }
  return chain;
}

std::int64_t nanoseconds(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

// One way to train the model.
class Contender {
 public:
  Contender(std::string kind, const shoal::Group& group) : name(std::move(kind)), module_(make_model()) {
    if (name == "shoal") wrapper_.emplace(module_, group);
    if (name == "copying") {
      std::size_t bytes = 0;
      for (const Tensor& parameter : module_->parameters()) bytes += parameter.nbytes();
      copies_.resize(bytes);
    }
    optimizer_ = std::make_unique<torch::optim::SGD>(module_->parameters(), torch::optim::SGDOptions(1e-5));
    parameters_ = module_->parameters();
  }

  void step(const Tensor& x, const Tensor& y) {
    optimizer_->zero_grad();
    const Tensor output = wrapper_ ? wrapper_->forward(x) : module_->forward(x);
    torch::mse_loss(output, y).backward();
    if (copies_.empty()) return;
    char* to = copies_.data();
    for (const Tensor& parameter : parameters_) {
      const Tensor& gradient = parameter.grad();
      std::memcpy(to, gradient.const_data_ptr(), gradient.nbytes());
      to += gradient.nbytes();
    }
  }
  void update() { optimizer_->step(); }

  const std::string name;
  std::vector<std::string> turns;

 private:
  nn::Sequential module_;
  std::optional<shoal::DistributedDataParallel<nn::Sequential>> wrapper_;
  std::vector<Tensor> parameters_;
  std::vector<char> copies_;
  std::unique_ptr<torch::optim::SGD> optimizer_;
};

std::string joined(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : ", ") + part;
  return "[" + text + "]";
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  torch::set_num_threads(1);
  const shoal::Group group = shoal::init();
  const Tensor x = torch::randn({kBatch, kWidth}), y = torch::randn({kBatch, kWidth});
  std::vector<std::unique_ptr<Contender>> contenders;
  for (const char* name : {"alone", "copying", "shoal"})
    contenders.push_back(std::make_unique<Contender>(name, group));
  const std::int64_t end = nanoseconds(CLOCK_MONOTONIC) + static_cast<std::int64_t>(std::stod(argv[1]) * 1e9);
  for (int round = 0;; ++round) {
    std::vector<std::int64_t> left{end - nanoseconds(CLOCK_MONOTONIC)};
    group.broadcast(shoal::Array<std::int64_t>(left), 0).wait();
    if (left[0] < 0 && round > 1) break;
    for (std::size_t turn = 0; turn < contenders.size(); ++turn) {
      Contender& contender = *contenders[(turn + static_cast<std::size_t>(round)) % contenders.size()];
      std::vector<std::string> steps;
      for (int step = 0; step < kStepsOfATurn; ++step) {
        group.barrier().wait();
        const std::int64_t cpu = nanoseconds(CLOCK_PROCESS_CPUTIME_ID), began = nanoseconds(CLOCK_MONOTONIC);
        contender.step(x, y);
        const std::int64_t ended = nanoseconds(CLOCK_MONOTONIC);
        const std::int64_t used = nanoseconds(CLOCK_PROCESS_CPUTIME_ID) - cpu;
        steps.push_back(joined({std::to_string(began), std::to_string(ended), std::to_string(used)}));
        contender.update();
      }
      if (round > 0) contender.turns.push_back(joined(steps));  // DDP arranges its buckets in the first
    }
  }
  std::ofstream file(std::string(argv[2]) + "/" + std::to_string(group.rank()) + ".json");
  file << "{\"parameters\": " << 2 * kLayers << ", \"steps\": {";
  for (const auto& contender : contenders)
    file << (contender == contenders.front() ? "" : ", ") << '"' << contender->name
         << "\": " << joined(contender->turns);
  file << "}}\n";
}
