//! Reads from a rule of nftables how it translates the source of packets: by which device, to which
//! address and ports (`<linux/netfilter/nf_tables.h>`).
//!
//! The expressions of a rule run in order over registers. An address or port range is loaded into
//! registers by `immediate`, and then named by `masq` or `nat`. What comes from elsewhere (a map, a
//! field of the packet) is unknown, and taken for anything.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    ops::RangeInclusive,
};

use super::nfnetlink::{find, number, text};
use crate::netlink::raw;

/// Translation of sources by a rule.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Translation {
    /// Device by which the packets leave; `None`: any, as far as is known.
    pub(super) device: Option<Device>,
    /// Addresses that replace the source.
    pub(super) addresses: Addresses,
    /// The new ports; `None`: any that is free.
    pub(super) ports: Option<RangeInclusive<u16>>,
}

/// Addresses that a rule gives packets as their source.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum Addresses {
    /// That of the device by which they leave: masquerading.
    OfDevice,
    /// One address of this range.
    Among(RangeInclusive<IpAddr>),
    /// Those of a map, or reckoned from the packet's own (`NETMAP`): any.
    #[default]
    Unknown,
}

impl Addresses {
    fn among(range: Option<RangeInclusive<IpAddr>>) -> Self {
        range.map_or(Self::Unknown, Self::Among)
    }
}

/// Name of a device in a rule.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Device {
    /// The device with exactly this name.
    Named(String),
    /// All whose names begin so.
    Prefix(String),
}

impl Device {
    /// Whether a device of this name is meant.
    pub fn is(&self, name: &str) -> bool {
        match self {
            Self::Named(named) => named == name,
            Self::Prefix(prefix) => name.starts_with(prefix.as_str()),
        }
    }
}

/// Targets of iptables-nft that translate sources.
pub(super) const TARGETS: [&str; 3] = ["MASQUERADE", "SNAT", "NETMAP"];

/// State of a rule while its expressions are read.
#[derive(Default)]
struct Registers<'a> {
    values: HashMap<u32, &'a [u8]>,
    /// The register with the name of the device by which a packet leaves.
    device: Option<u32>,
}

impl<'a> Registers<'a> {
    fn value(&self, of: &[u8], attribute: u16) -> Option<&'a [u8]> {
        let register = find(of, attribute).and_then(number)?;
        self.values.get(&register).copied()
    }

    fn range<T>(
        &self,
        of: &[u8],
        [least, most]: [u16; 2],
        read: impl Fn(&[u8]) -> Option<T>,
    ) -> Option<RangeInclusive<T>> {
        let least_value = self.value(of, least)?;
        let most_value = self.value(of, most).unwrap_or(least_value);
        Some(read(least_value)?..=read(most_value)?)
    }
}

/// Returns the translation by a rule with these expressions; `None`: it translates no sources.
/// `is_ipv6`: the rule's family is IPv6.
pub(super) fn translation(expressions: &[u8], is_ipv6: bool) -> Option<Translation> {
    const NFTA_EXPR_NAME: u16 = 1;
    const NFTA_EXPR_DATA: u16 = 2;
    let mut registers = Registers::default();
    let mut device = None;
    for (_, expression) in raw::attributes(expressions) {
        let name = find(expression, NFTA_EXPR_NAME).map_or_else(String::new, text);
        let data = find(expression, NFTA_EXPR_DATA).unwrap_or_default();
        let translation = match name.as_str() {
            "immediate" => {
                load(&mut registers, data);
                None
            }
            "meta" => {
                note_meta(&mut registers, data);
                None
            }
            "cmp" => {
                device = device.or_else(|| compared_device(&registers, data));
                None
            }
            "masq" => Some(Translation {
                addresses: Addresses::OfDevice,
                ports: registers.range(data, [2, 3], port),
                ..Translation::default()
            }),
            "nat" => by_nat(&registers, data),
            "target" => by_target(data, is_ipv6),
            "counter" | "match" | "log" | "limit" | "quota" | "range" => None,
            // It may load something else into any register.
            _ => {
                registers = Registers::default();
                None
            }
        };
        if let Some(translation) = translation {
            return Some(Translation {
                device,
                ..translation
            });
        }
    }
    None
}

fn load<'a>(registers: &mut Registers<'a>, data: &'a [u8]) {
    const NFTA_IMMEDIATE_DREG: u16 = 1;
    const NFTA_IMMEDIATE_DATA: u16 = 2;
    let register = find(data, NFTA_IMMEDIATE_DREG).and_then(number);
    let value = find(data, NFTA_IMMEDIATE_DATA).and_then(value_of);
    if let (Some(register), Some(value)) = (register, value) {
        registers.values.insert(register, value);
    }
}

fn note_meta(registers: &mut Registers<'_>, data: &[u8]) {
    const NFTA_META_DREG: u16 = 1;
    const NFTA_META_KEY: u16 = 2;
    const NFT_META_OIFNAME: u32 = 7;
    let register = find(data, NFTA_META_DREG).and_then(number);
    if let Some(register) = register {
        registers.values.remove(&register);
    }
    match find(data, NFTA_META_KEY).and_then(number) {
        Some(NFT_META_OIFNAME) => registers.device = register,
        // It has something else now.
        _ if registers.device == register => registers.device = None,
        _ => {}
    }
}

fn compared_device(registers: &Registers<'_>, data: &[u8]) -> Option<Device> {
    const NFTA_CMP_SREG: u16 = 1;
    const NFTA_CMP_OP: u16 = 2;
    const NFTA_CMP_DATA: u16 = 3;
    const NFT_CMP_EQ: u32 = 0;
    let register = find(data, NFTA_CMP_SREG).and_then(number)?;
    let is_equal = find(data, NFTA_CMP_OP).and_then(number) == Some(NFT_CMP_EQ);
    if registers.device != Some(register) || !is_equal {
        return None;
    }
    let name = value_of(find(data, NFTA_CMP_DATA)?)?;
    let of = |name: &[u8]| String::from_utf8_lossy(name).into_owned();
    Some(match name.iter().position(|byte| *byte == 0) {
        Some(end) => Device::Named(of(&name[..end])),
        // Compared are as many bytes as it has.
        None => Device::Prefix(of(name)),
    })
}

fn by_nat(registers: &Registers<'_>, data: &[u8]) -> Option<Translation> {
    const NFTA_NAT_TYPE: u16 = 1;
    const NFT_NAT_SNAT: u32 = 0;
    if find(data, NFTA_NAT_TYPE).and_then(number) != Some(NFT_NAT_SNAT) {
        return None;
    }
    Some(Translation {
        device: None,
        addresses: Addresses::among(registers.range(data, [3, 4], address)),
        ports: registers.range(data, [5, 6], port),
    })
}

/// Reads a target of iptables-nft, which has the structures of `<linux/netfilter/nf_nat.h>`.
fn by_target(data: &[u8], is_ipv6: bool) -> Option<Translation> {
    const NFTA_TARGET_NAME: u16 = 1;
    const NFTA_TARGET_REV: u16 = 2;
    const NFTA_TARGET_INFO: u16 = 3;
    let name = find(data, NFTA_TARGET_NAME).map(text)?;
    if !TARGETS.contains(&name.as_str()) {
        return None;
    }
    let revision = find(data, NFTA_TARGET_REV).and_then(number).unwrap_or(0);
    let info = find(data, NFTA_TARGET_INFO).unwrap_or_default();
    // Other revisions are not used for IPv4.
    let range = (name != "NETMAP").then(|| match (is_ipv6, revision) {
        (true, _) => range6(info),
        (false, 0) => ranges(info),
        (false, _) => None,
    });
    let translation = range.flatten().unwrap_or_default();
    Some(match name.as_str() {
        "MASQUERADE" => Translation {
            addresses: Addresses::OfDevice,
            ..translation
        },
        _ => translation,
    })
}

/// Reads a `struct nf_nat_ipv4_multi_range_compat` with one range.
fn ranges(info: &[u8]) -> Option<Translation> {
    let word = |at: usize| info.get(at..at + 4)?.first_chunk::<4>().copied();
    let flags = u32::from_ne_bytes(word(4)?);
    let [least, most] = [word(8)?, word(12)?].map(|octets| IpAddr::from(Ipv4Addr::from(octets)));
    let addresses = least..=most;
    let ports = port(info.get(16..18)?)?..=port(info.get(18..20)?)?;
    Some(of_range(flags, addresses, ports))
}

/// Reads a `struct nf_nat_range`, which the targets of IPv6 have in each revision; `nf_nat_range2`
/// begins alike.
fn range6(info: &[u8]) -> Option<Translation> {
    let flags = u32::from_ne_bytes(*info.first_chunk()?);
    let addresses = address(info.get(4..20)?)?..=address(info.get(20..36)?)?;
    let ports = port(info.get(36..38)?)?..=port(info.get(38..40)?)?;
    Some(of_range(flags, addresses, ports))
}

/// Returns the translation by a range, whose flags say which parts of it hold.
fn of_range(
    flags: u32,
    addresses: RangeInclusive<IpAddr>,
    ports: RangeInclusive<u16>,
) -> Translation {
    const MAP_IPS: u32 = 1;
    const PROTO_SPECIFIED: u32 = 2;
    Translation {
        device: None,
        addresses: Addresses::among((flags & MAP_IPS != 0).then_some(addresses)),
        ports: (flags & PROTO_SPECIFIED != 0).then_some(ports),
    }
}

fn value_of(data: &[u8]) -> Option<&[u8]> {
    const NFTA_DATA_VALUE: u16 = 1;
    find(data, NFTA_DATA_VALUE)
}

fn port(value: &[u8]) -> Option<u16> {
    value.first_chunk().map(|port| u16::from_be_bytes(*port))
}

/// An address of either family, by its length.
fn address(value: &[u8]) -> Option<IpAddr> {
    match value.first_chunk::<16>() {
        Some(octets) => Some(Ipv6Addr::from(*octets).into()),
        None => {
            let octets = value.first_chunk::<4>()?;
            Some(Ipv4Addr::from(*octets).into())
        }
    }
}
