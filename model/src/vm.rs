//! Description of a VM and its network.
use std::{
    collections::BTreeMap,
    fmt::{self, Display, Formatter},
    net::{Ipv4Addr, Ipv6Addr},
};

use ipnet::Ipv6Net;
use serde::{Deserialize, Serialize};
use slipgate_abi::{IfIndex, Vm, VmId, VmRow, activity::LastPackets};
use slipgate_policy::{AddressPool, EgressRoutes, LoopbackPorts};

/// Labels of a VM, by key. They mean nothing to slipgate.
pub type Labels = BTreeMap<String, String>;

/// A VM and its network, as the broker describes it to the engine.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct VmSpec {
    /// Id of the VM, never reused.
    pub id: VmId,
    /// Row of the VM in `VMS`, `COUNTERS` and `DROPS`.
    pub row: VmRow,
    /// Name of the VM, given by the user.
    pub name: String,
    /// Labels that records show.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub labels: Labels,
    /// Address of the guest.
    pub guest: Ipv4Addr,
    /// Address of the gateway, which the engine answers for.
    pub gateway: Ipv4Addr,
    /// Address of the resolver, which the engine answers for.
    pub dns: Ipv4Addr,
    /// Prefix length of the guest's network.
    pub prefix_len: u8,
    /// IPv6 network of the guest; `None`: IPv6 is off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv6: Option<GuestIpv6>,
    /// MAC of the guest as configured; `None`: the guest may have any.
    pub guest_mac: Option<[u8; 6]>,
    /// MAC of the gateway.
    pub gateway_mac: [u8; 6],
    /// MTU of the guest's link, L3 bytes.
    pub mtu: u16,
    /// Most live flows at once.
    pub max_flows: u32,
    /// Most flows admitted per second.
    pub new_flows_per_second: u32,
    /// Index of the VM's policy in the process's policies.
    pub policy: u32,
    /// Only link by which its flows leave, [`IfIndex::NONE`] while that link does not exist; `None`:
    /// the one of [`RouteSnapshot`](crate::RouteSnapshot).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uplink: Option<IfIndex>,
    /// Routes by which its flows leave; `None`: those of the table `main`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub routes: Option<EgressRoutes>,
    /// Source addresses toward the world, of which it is paired with one of each family; empty: the
    /// routes choose.
    #[serde(default, skip_serializing_if = "AddressPool::is_empty")]
    pub nat_addresses: AddressPool,
    /// Ports of the gateway that lead to the host's loopback, before those of the policy.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub host_loopback: Vec<LoopbackPorts>,
    /// Most DNS questions per second; 0: no limit.
    pub dns_per_second: u32,
    /// Silence after which the VM is idle, seconds; 0: it is not told.
    pub idle_after_s: u32,
    /// Whether the VM was idle when its description was made.
    pub is_idle: bool,
}

/// How long a VM has been silent, when it fell idle or was busy again. Only packets that count as its
/// activity are meant.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Silence {
    /// Time since the guest's last packet, ms; `None`: it has sent none.
    pub last_from_guest_ms: Option<u64>,
    /// Time since the last packet to the guest, ms; `None`: there was none.
    pub last_to_guest_ms: Option<u64>,
    /// Number of live flows.
    pub flows: u64,
}

impl Silence {
    /// The silence of a VM whose last packets were at these times. `now_ns`: `CLOCK_MONOTONIC`.
    pub fn of(last: LastPackets, flows: u64, now_ns: u64) -> Self {
        let age_ms = |last_ns| (last_ns > 0).then_some(now_ns.saturating_sub(last_ns) / 1_000_000);
        Self {
            last_from_guest_ms: age_ms(last.from_guest_ns),
            last_to_guest_ms: age_ms(last.to_guest_ns),
            flows,
        }
    }

    /// The silence of a VM of which this and `other` each know some packets. `other` is the later answer,
    /// and has the number of flows.
    pub fn with(self, other: Self) -> Self {
        let least = |a: Option<u64>, b: Option<u64>| a.into_iter().chain(b).min();
        Self {
            last_from_guest_ms: least(self.last_from_guest_ms, other.last_from_guest_ms),
            last_to_guest_ms: least(self.last_to_guest_ms, other.last_to_guest_ms),
            flows: other.flows,
        }
    }
}

/// One page of an engine's answer about a VM's activity.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ActivityPage {
    /// The VM that the page is about: its name may be another's by now.
    pub vm: VmId,
    /// Last packets as far as the page's flows tell, and the number of all flows.
    pub silence: Silence,
    /// Where the next page begins; `None`: this is the last.
    pub next: Option<u64>,
}

/// Whether a VM's guest has IPv6.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Ipv6Mode {
    /// The guest gets no IPv6.
    #[default]
    Off,
    /// It has, and its packets are translated to the uplink's address.
    Nat,
    /// As `Nat`, once its uplink leads to IPv6
    /// ([`RouteTable::leads_to_ipv6`](crate::route::RouteTable::leads_to_ipv6)).
    Auto,
    /// It has, and its packets leave with its own addresses: the network routes its prefix to the
    /// host.
    Routed,
}

impl Ipv6Mode {
    /// Returns the name used on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Nat => "nat",
            Self::Auto => "auto",
            Self::Routed => "routed",
        }
    }
}

/// IPv6 network of a guest: a link with one prefix, or for a guest with one address, whose router and
/// resolver slipgate is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct GuestIpv6 {
    /// Prefix of the guest's addresses: of 64 bits, as SLAAC requires, or its single address, of 128
    /// bits, which it gets by DHCPv6.
    pub prefix: Ipv6Net,
    /// Whether the network routes the prefix to this host, so that the guest's packets leave with
    /// their own source address.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_routed: bool,
}

impl GuestIpv6 {
    /// Network of the gateway of guests with a single address, which can't have it in their own: a
    /// unique local one (RFC 4193). The guests reach it by their default route.
    pub const GATEWAY_NET: Ipv6Net =
        Ipv6Net::new_assert(Ipv6Addr::new(0xfd73, 0x6c69, 0x7067, 0, 0, 0, 0, 0), 64);

    /// Returns the guest's single address; `None`: it makes its own of a /64.
    pub fn single_address(&self) -> Option<Ipv6Addr> {
        (self.prefix.prefix_len() == 128).then(|| self.prefix.addr())
    }

    /// Returns the network of which all addresses but the guest's own are the gateway's to answer.
    pub fn gateway_net(&self) -> Ipv6Net {
        match self.single_address() {
            Some(_) => Self::GATEWAY_NET,
            None => self.prefix,
        }
    }

    /// Returns the gateway's address: the first one of its network. It is the resolver's too.
    pub fn gateway(&self) -> Ipv6Addr {
        Ipv6Addr::from_bits(self.gateway_net().network().to_bits() | 1)
    }

    /// Returns the address of a host that does not make its own: the second one.
    pub fn first_host(&self) -> Ipv6Addr {
        Ipv6Addr::from_bits(self.prefix.network().to_bits() | 2)
    }

    /// Returns the gateway's link-local address, which is the router's in advertisements: the one
    /// that its MAC gives (RFC 4291 appendix A).
    pub fn gateway_link_local(&self, gateway_mac: [u8; 6]) -> Ipv6Addr {
        let [a, b, c, d, e, f] = gateway_mac;
        let id = u64::from_be_bytes([a ^ 2, b, c, 0xff, 0xfe, d, e, f]);
        Ipv6Addr::from_bits(0xfe80 << 112 | u128::from(id))
    }

    /// Whether an address is one of the gateway's.
    pub fn is_gateways(&self, addr: Ipv6Addr, gateway_mac: [u8; 6]) -> bool {
        addr == self.gateway() || addr == self.gateway_link_local(gateway_mac)
    }
}

/// A VM that is configured with one MAC, and frames that came from another and were dropped.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MacMismatch {
    /// MAC that the VM is configured with.
    pub configured: String,
    /// Source of the last frame that was dropped for it.
    pub seen: String,
}

impl MacMismatch {
    /// Returns the mismatch that a VM's row shows; `None` if there is none.
    pub fn of(vm: &Vm) -> Option<Self> {
        let text = |mac: [u8; 6]| mac.map(|byte| format!("{byte:02x}")).join(":");
        vm.mac_mismatch().map(|seen| Self {
            configured: text(vm.guest_mac),
            seen: text(seen),
        })
    }
}

impl Display for MacMismatch {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { configured, seen } = self;
        write!(
            f,
            "frames come from MAC {seen}, but the VM is configured with {configured}: they are \
             dropped as spoofed. Give the guest's card {configured} (Cloud Hypervisor picks a \
             random MAC at each boot unless `mac=` is given), or configure the VM with {seen} or \
             without a MAC."
        )
    }
}

#[cfg(test)]
#[path = "vm_test.rs"]
mod tests;
