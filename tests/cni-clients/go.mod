// CNI's own client, and a VMM's reader of results, for tests of `slipgate cni`. `cargo xtask test`
// builds both into target/tools.
module slipgate.test/cni-clients

go 1.21

require (
	github.com/containernetworking/cni v1.3.0
	github.com/firecracker-microvm/firecracker-go-sdk v1.0.0
)

require (
	github.com/containernetworking/plugins v1.0.1 // indirect
	github.com/vishvananda/netlink v1.1.1-0.20210330154013-f5de75959ad5 // indirect
	github.com/vishvananda/netns v0.0.4 // indirect
	golang.org/x/sys v0.23.0 // indirect
)
