// The training of examples/digits.py in C++: the same network, steps and accuracy.
//
//   $ python examples/cpp/digits_csv.py digits.csv
//   $ torch=$(python -c "import torch; print(torch.utils.cmake_prefix_path)")
//   $ cmake -S examples/cpp -B build/digits -DCMAKE_BUILD_TYPE=Release \
//       -DCMAKE_PREFIX_PATH=$torch -Dshoal_DIR=$(shoal config --cmake-dir)
//   $ cmake --build build/digits
//   $ shoal run -n 2 build/digits/digits digits.csv
//   [0] epoch 1/12  loss 1.9369  test accuracy 76.4 %
//   ...
//   [0] epoch 12/12  loss 0.0066  test accuracy 99.2 %
//   [0] test accuracy 99.17 % (357 of 360 digits) after 12 epochs on 2 ranks
//
// A second argument is the number of epochs.
#include <shoal/torch.h>
#include <torch/nn.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace nn = torch::nn;
using at::Tensor;
using at::indexing::None;
using at::indexing::Slice;

// Images [n, 1, 8, 8] with values from 0 to 1, and their labels.
struct Digits {
  Tensor images, labels;
  Digits part(Slice rows) const { return {images.index({rows}), labels.index({rows})}; }
};

Digits load(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error("cannot read " + path + "; write it with digits_csv.py");
  std::vector<double> pixels;
  std::vector<std::int64_t> labels;
  for (std::string line; std::getline(file, line);) {
    std::istringstream fields(line);
    for (std::string field; std::getline(fields, field, ',');) pixels.push_back(std::stod(field));
    labels.push_back(static_cast<std::int64_t>(pixels[pixels.size() - 65]));
    pixels.erase(pixels.end() - 65);
  }
  const auto count = static_cast<std::int64_t>(labels.size());
  return {torch::tensor(pixels, at::kDouble).view({count, 1, 8, 8}) / 16, torch::tensor(labels)};
}

// 38,282 parameters, in double precision, with which all numbers of ranks train the same network.
nn::Sequential make_network() {
  torch::manual_seed(0);
  nn::Sequential network;  // not by one call with all layers, which evaluates its arguments in any order
  network->push_back(nn::Conv2d(nn::Conv2dOptions(1, 16, 3).padding(1)));
  network->push_back(nn::ReLU());
  network->push_back(nn::Conv2d(nn::Conv2dOptions(16, 32, 3).padding(1)));
  network->push_back(nn::ReLU());
  network->push_back(nn::MaxPool2d(2));
  network->push_back(nn::Flatten());
  network->push_back(nn::Linear(512, 64));
  network->push_back(nn::ReLU());
  network->push_back(nn::Linear(64, 10));
  network->to(at::kDouble);
  return network;
}

using Model = shoal::DistributedDataParallel<nn::Sequential>;

// The number of test images that the model classifies correctly; each rank evaluates its part.
std::int64_t evaluate(const shoal::Group& group, Model& model, const Digits& test) {
  const torch::NoGradGuard no_grad;
  const Digits mine = test.part(Slice(group.rank(), None, group.size()));
  const Tensor right = (model.forward(mine.images).argmax(1) == mine.labels).sum();
  return group.all_reduce(right).wait().item<std::int64_t>();
}

void train(const shoal::Group& group, const std::string& path, int epochs) {
  constexpr std::int64_t kBatch = 32;  // images per step on all ranks together
  constexpr double kRate = 0.1;
  const Digits all = load(path), training = all.part(Slice(None, -360)), test = all.part(Slice(-360, None));
  Model model(make_network(), group);
  torch::optim::SGD optimizer(model.parameters(),
                              torch::optim::SGDOptions(kRate).momentum(0.9).weight_decay(3e-3));
  const at::Generator shuffle = at::detail::createCPUGenerator(0);
  const std::int64_t count = training.labels.size(0);
  std::int64_t right = 0;
  for (int epoch = 0; epoch < epochs; ++epoch) {
    static_cast<torch::optim::SGDOptions&>(optimizer.param_groups()[0].options())
        .lr(kRate / 2 * (1 + std::cos(M_PI * epoch / epochs)));
    Tensor loss_sum = torch::zeros({}, at::kDouble);
    for (const Tensor& step : at::randperm(count, shuffle).split(kBatch)) {
      const Tensor mine = step.slice(0, group.rank(), step.size(0), group.size());
      const Tensor loss = nn::functional::cross_entropy(
          model.forward(training.images.index({mine})), training.labels.index({mine}),
          nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
      // DDP averages gradients over ranks.  With this factor the average is the gradient of the mean loss
      // over the whole batch, even if the ranks' parts differ in size.
      optimizer.zero_grad();
      (loss * group.size() / step.size(0)).backward();
      optimizer.step();
      loss_sum += loss.detach();
    }
    const double loss = group.all_reduce(loss_sum).wait().item<double>() / static_cast<double>(count);
    right = evaluate(group, model, test);
    if (group.rank() == 0)
      std::printf("epoch %d/%d  loss %.4f  test accuracy %.1f %%\n", epoch + 1, epochs, loss, right / 3.6);
  }
  if (group.rank() == 0)
    std::printf("test accuracy %.2f %% (%d of 360 digits) after %d epochs on %d rank%s\n", right / 3.6,
                static_cast<int>(right), epochs, group.size(), group.size() > 1 ? "s" : "");
}

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: digits digits.csv [EPOCHS]\n");
    return 2;
  }
  try {
    const shoal::Group group = shoal::init();
    const int cores = static_cast<int>(std::thread::hardware_concurrency());
    torch::set_num_threads(std::max(1, cores / group.local_size()));
    train(group, argv[1], argc > 2 ? std::stoi(argv[2]) : 12);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
