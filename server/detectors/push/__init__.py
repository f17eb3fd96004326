"""The family of gradients that workers push to a parameter server, each at its own pace."""
