//! The pacing device: a veth pair, with the VMs' queue in front of its near end, and the program that
//! sends on at its far end.
//!
//! As with the engine port, the host must send nothing of its own there: no ARP, no IPv6, no
//! forwarding, no address. GSO frames pass whole, so the MTU is the largest. The pair outlives the
//! process, because established flows do, and the programs send by it.

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::{
    RouteNetlinkMessage,
    link::{InfoData, InfoKind, InfoVeth, LinkAttribute, LinkInfo, LinkMessage},
};
use slipgate_abi::{IfIndex, VmRow};

use super::htb::{Class, Queue};
use crate::{
    Result,
    device::Device,
    netlink::{Requests, remove_link},
};

/// Names of the ends, before the owner's row.
const NEAR: &str = "sgpace";
const FAR: &str = "sgpaced";
/// MTU of both ends, L3 bytes: the largest of a veth.
const MTU_BYTES: u32 = 65_535;

/// The pair of a process.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PacingDevice {
    /// Name of the near end.
    pub name: String,
    /// Index of the near end, to which the programs send.
    pub near: IfIndex,
    /// Index of the far end.
    pub far: IfIndex,
}

impl PacingDevice {
    /// Makes the pair of an owner's row, or takes its predecessor's. It is down until
    /// it is served ([`crate::serve::serve_pacer`]).
    ///
    /// # Errors
    /// The kernel has no veth or no HTB, or another device has the name.
    pub fn open(owner_row: u32) -> Result<Self> {
        let (name, far_name) = names_for(owner_row);
        if Device::named(&name).is_err() {
            make_pair(&name, &far_name)?;
        }
        let (near, far) = (Device::named(&name)?, Device::named(&far_name)?);
        for end in [&near, &far] {
            end.disable_ipv6()?;
            end.set_forwarding(false)?;
            end.set_arp(false)?;
            end.set_mtu(MTU_BYTES)?;
        }
        let device = Self {
            near: near.ifindex()?,
            far: far.ifindex()?,
            name,
        };
        Queue::at(device.near).make(&mut Requests::open()?, 0)?;
        Ok(device)
    }

    /// Lets a VM's packets go at a rate of L3 bytes per second.
    ///
    /// # Errors
    /// The kernel refuses, or the device is gone.
    pub fn shape(&self, row: VmRow, bytes_per_second: u64) -> Result<()> {
        let class = Class::new(row.get(), bytes_per_second);
        Queue::at(self.near).set_class(&mut Requests::open()?, class)
    }

    /// Ends that, once the programs do not send by the device any more. Frames that wait are lost.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn unshape(&self, row: VmRow) -> Result<()> {
        Queue::at(self.near).remove_class(&mut Requests::open()?, row.get())
    }

    /// Removes an owner's pair if it exists. Returns whether there was one.
    ///
    /// # Errors
    /// The device cannot be removed.
    pub fn remove(owner_row: u32) -> Result<bool> {
        let (name, _) = names_for(owner_row);
        match Device::named(&name).ok().filter(is_pacer) {
            Some(device) => remove_link(device.ifindex()?, &name).map(|()| true),
            None => Ok(false),
        }
    }
}

/// Returns the names of both ends.
fn names_for(owner_row: u32) -> (String, String) {
    (format!("{NEAR}{owner_row}"), format!("{FAR}{owner_row}"))
}

/// Whether a device is the far end of a pair.
pub(crate) fn is_far_end(device: &Device) -> bool {
    device.name().starts_with(FAR) && is_pacer(device)
}

/// Whether a device with such a name was made by [`PacingDevice::open`].
fn is_pacer(device: &Device) -> bool {
    let silent = device.flags().is_ok_and(|f| f & libc::IFF_NOARP != 0);
    silent && device.mtu().is_ok_and(|mtu| mtu == MTU_BYTES)
}

fn make_pair(name: &str, far_name: &str) -> Result<()> {
    let mut far = LinkMessage::default();
    far.attributes.push(LinkAttribute::IfName(far_name.into()));
    let mut pair = LinkMessage::default();
    pair.attributes.push(LinkAttribute::IfName(name.into()));
    pair.attributes.push(LinkAttribute::LinkInfo(vec![
        LinkInfo::Kind(InfoKind::Veth),
        LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(far))),
    ]));
    Requests::open()?.send(
        RouteNetlinkMessage::NewLink(pair),
        NLM_F_CREATE | NLM_F_EXCL,
        &format!("make the pacing device {name} (does the kernel have veth?)"),
    )
}
