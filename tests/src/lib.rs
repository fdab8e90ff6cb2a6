//! The network testbed that the end-to-end tests, `cargo xtask run` and the benchmarks share.
//!
//! It makes a private network out of namespaces it alone holds, with a Linux guest behind a TAP
//! that is served as a VMM serves it (GSO frames whole, partial checksums partial), servers in the
//! world, and clients to run in the guest. Root and `/dev/net/tun` are needed. Everything is gone
//! when it is dropped, after a panic, and when the process is killed.
//!
//! ```text
//!  guest ns          host ns                                   world ns
//!  eth0 ──pump── tap0  [slipgate]  up0 ── veth, tun or bad link ── w0   servers on lo
//!  10.0.2.15                  198.18.0.2/24        198.18.0.1/24        203.0.113.10, .20
//! ```
//!
//! | for | see |
//! | --- | --- |
//! | the private network | [`World`], [`WorldConfig`], [`Uplink`] |
//! | a guest: static or DHCP, hand-made frames, filters, unplugging | [`Guest`], [`GuestConfig`] |
//! | code or a program inside a namespace | [`NetNs::run`], [`NetNs::spawn`] |
//! | a guest behind a stream socket, as QEMU's `-netdev stream` | [`SocketGuest`] |
//! | servers and clients | [`servers`], [`clients`] |
//! | hand-made packets | [`frame::FrameBuilder`], [`frame::Packet`], [`tls::ClientHello`], [`quic::Initial`] |
//! | counting as if segmented | [`Capture`], [`Guest::flows`], [`accounting`] |
//! | a link that loses, duplicates, reorders | [`impairment::Impairment`] |
//! | slipgate itself and its pins | [`Slipgate`], [`PinDir`] |
//! | a microVM under slipgate's own VMM | [`MicroVm`] |
//! | slipgate without root | [`OrdinaryUser`] |
//! | what the kernel and the guest's link say of it | [`kernel_view`], [`census`] |
//! | what it is compared with | [`baseline`] |
//! | threads that stay on a CPU | [`affinity`], [`GuestConfig::pump_cpu`] |
//! | the built-in guest under `slipgate run` or QEMU | [`builtin_guest`] |
//! | numbered messages of a guest over vsock | [`vsock_messages`] |
//! | CPU time of a process's threads | [`cpu_time`] |
//! | pages for a pool of the host's | [`HugePages`] |
//! | tests that can't run beside others | [`turns::alone`] |
//! | tests that can't run here | [`require_root_and_tun!`], [`skipped!`] |
//!
//! # Example
//! ```no_run
//! use std::time::Duration;
//! use slipgate_testbed::{
//!     Capture, Guest, GuestConfig, PinDir, Slipgate, World, clients::tcp,
//!     servers::{TcpServer, TcpService}, world::{SERVER, UPLINK},
//! };
//!
//! # fn main() -> slipgate_testbed::Result<()> {
//! let wait = Duration::from_secs(5);
//! let world = World::new()?;
//! let server = TcpServer::start(&world.net, (SERVER, 7000), TcpService::Streams)?;
//! let guest = Guest::new(&world, GuestConfig::new("tap0").unconfigured())?;
//! let pins = PinDir::new()?;
//! let slipgate = Slipgate::attach(&world.host, &pins, &["--tap", "tap0", "--uplink", UPLINK])?;
//! let lease = guest.dhcp(wait)?;
//! let uplink = Capture::start(&world.host, UPLINK)?;
//! guest.run(|| tcp::upload(server.address(), 1_000_000, 1, wait))?;
//! let seen = uplink.finish()?;
//! println!("{lease:?} {:?} {:?}", seen.sent.flows, slipgate.flows()?);
//! # Ok(())
//! # }
//! ```
#![cfg(target_os = "linux")]

pub mod accounting;
mod addresses_ipv6;
pub mod affinity;
pub mod baseline;
mod builds;
pub mod builtin_guest;
mod capture;
pub mod census;
pub mod clients;
pub mod cpu_time;
pub mod dhcp;
pub mod dhcpv6;
pub mod dns_wire;
pub mod error;
pub mod ethtool;
pub mod flow_log;
mod followed;
pub mod frame;
mod guest;
mod huge_pages;
pub mod impairment;
pub mod kernel_view;
mod link_sender;
mod microvm;
mod netns;
mod ordinary_user;
mod owner;
pub mod pattern;
pub mod pcap;
mod pins;
pub mod pump;
pub mod quic;
pub mod requirements;
pub mod rig;
pub mod servers;
pub mod slipgate;
mod socket_guest;
mod sockets;
pub mod streams;
pub mod stun;
pub mod tap;
pub mod tcx;
pub mod test_run;
pub mod tls;
pub mod turns;
pub mod vsock_messages;
pub mod world;
pub mod world_ipv6;

pub use capture::{Capture, Captured, CapturedFrame};
pub use error::{Error, Result};
pub use followed::Followed;
pub use guest::{GUEST_DEVICE, Guest, GuestConfig};
pub use huge_pages::HugePages;
pub use link_sender::LinkSender;
pub use microvm::{Line, MicroVm, MicroVmEnd};
pub use netns::{CONGESTION_CONTROL, CongestionControlBy, NetNs};
pub use ordinary_user::OrdinaryUser;
pub use owner::{children_named, signal};
pub use pins::PinDir;
pub use pump::Direction;
pub use slipgate::Slipgate;
pub use socket_guest::SocketGuest;
pub use world::{Uplink, World, WorldConfig};
