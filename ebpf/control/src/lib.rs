//! Control of the kernel side: loads the BPF programs, pins them and their maps, attaches them,
//! makes devices, and follows links, routes and neighbours. Packets do not pass through this crate.
//!
//! # Calls of a broker, in order
//!
//! ```text
//! Paths::of_this_netns()?  (or Paths::with_pin_dir(dir)?)
//! Datapath::open(&LoadOptions { paths, sizes, bpf_log, ipv6 })? maps made or joined; programs loaded, pinned,
//!                                                               put in place of an older build's under traffic
//! Owner::take(datapath.maps(), &paths, &names)?                 a row in OWNERS, locked for life; adopts
//! owner::sweep(datapath.maps(), &paths, [&owner], owner::PATIENCE)?  half-made and half-ended flows of the dead
//! tap::EnginePort::open(owner.row(), &mut handed_over)?         sgport<row>; .fd is for the engine
//! port.serve(&datapath, hook)?                                  attach, then up; hook: probe::best_hook()
//! vm::open(datapath.maps(), &owner, &VmSpec { .. })?            row and id; TAPS entry
//! routed::take(maps, &paths, routed, &open, &rows, datapath.patience())?  a prefix that the network routes to the VM
//! serve::serve_tap(&datapath, tap_ifindex, hook)?               attach, forwarding 0, and only then up
//! guest_tap::GuestTap::make(name, queues)?                      for a VMM of ours, before all of this; left down
//! datapath.attach(Program::uplink(has_l2), ifindex, hook)?
//! NetworkWatch::open()?   .network()  .update()?                in the poll loop, by .as_fd()
//! NextHops::new(vec![owner.row()])? .refresh(maps, watch.network(), uplink)?  after each update and engine request
//! serve::follow_taps(&datapath, watch.network(), &served, hook)?  after a change of links
//! pacing::shape_tap, pacing::PacingDevice::open(row)?           queues for VMs with rates
//! serve::shut_tap, vm::close, datapath.remove_if_last(vec![owner])?   orderly stop, after the engine's
//! ```
//!
//! # Calls of an engine, which needs no capability
//!
//! ```text
//! SharedMaps::from_fds(fds)?         in the order of SharedMaps::fds()
//! maps.slot(i), maps.vm(row), maps.drops(row), maps.counters(row), maps.next_hop(i), maps.rule_element(i)
//! maps.claim_chunk(owner_row, now_ns), maps.release_chunk(owner_row, slot, now_ns), maps.chunks_of(owner_row)
//! maps.claim_next_hop(owner_row, ifindex, address, route_mtu)
//! maps.flows.insert(&tuple, &flow, Insert::New) / .get / .remove / .entries      also forwards, taps, deny
//! ```
//!
//! `slipgate flows` and `stats` use [`maps::ReadOnlyMaps`]: memory that can't be written, no
//! descriptors, and copies instead of references.

pub mod attach;
mod bpf;
mod bpf_log;
pub mod btf;
pub mod device;
mod error;
mod fingerprint;
pub mod groups;
mod guest_namespace;
pub mod guest_tap;
mod held_guard;
pub mod host;
mod in_memory;
pub mod layout;
pub mod load;
mod lock;
pub mod maps;
pub mod netlink;
pub mod object;
pub mod owner;
pub mod pacing;
pub mod paths;
pub mod pins;
pub mod probe;
pub mod routed;
pub mod serve;
pub mod tap;
pub mod tap_settings;
pub mod users;
pub mod vm;
mod vm_rows;

pub use attach::{Hook, Program, XdpMode};
pub use bpf_log::BpfLog;
pub use error::{Error, Result};
pub use guest_namespace::{GuestDevice, GuestNamespace, NamespaceIpv6};
pub use held_guard::HeldGuard;
pub use in_memory::InMemory;
pub use layout::Sizes;
pub use load::{Datapath, LoadOptions};
pub use maps::{ReadOnlyMaps, SharedMaps};
pub use netlink::{Network, NetworkWatch, NextHops};
pub use owner::Owner;
pub use paths::Paths;
pub use users::Users;

#[cfg(test)]
#[path = "fixtures_test.rs"]
mod testing;
