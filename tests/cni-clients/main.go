// Command vmconf reads the result of an ADD with firecracker-go-sdk's parser and prints the network
// of the VM as JSON. Arguments: the container's id, and the file of the result.
package main

import (
	"encoding/json"
	"fmt"
	"os"

	"github.com/containernetworking/cni/pkg/types/create"
	"github.com/firecracker-microvm/firecracker-go-sdk/cni/vmconf"
)

func main() {
	if err := run(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(container, file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	result, err := create.CreateFromBytes(text)
	if err != nil {
		return err
	}
	network, err := vmconf.StaticNetworkConfFrom(result, container)
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(map[string]any{
		"tap":       network.TapName,
		"netns":     network.NetNSPath,
		"mac":       network.VMMacAddr,
		"mtu":       network.VMMTU,
		"boot":      network.IPBootParam(),
		"resolvers": network.VMNameservers,
	})
}
