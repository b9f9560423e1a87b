"""From a call to an FX graph, by TorchDynamo: its configuration, its inputs and names, its errors."""
