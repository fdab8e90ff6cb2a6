//! Configuration of a VM.
use std::{collections::BTreeMap, net::Ipv4Addr};

use ipnet::Ipv6Net;
use slipgate_abi::portframe::is_port_device;
use slipgate_ipc::client::{MAX_LABEL_BYTES, MAX_LABELS, MAX_VM_FORWARDS, VmDefinition};
use slipgate_model::Ipv6Mode;
use slipgate_policy::{
    AddressPool, LoopbackPorts,
    document::{
        ConfigError, Forward, Limits, Quotas, check_inline, check_name, forwards_of_vm,
        inline_name, loopback_of_vm, pool_of_vm,
    },
};

use super::{GuestNetwork, check_ipv6_prefix, check_routed_prefix};

/// Longest name of a network device, bytes (IFNAMSIZ less the final zero).
const MAX_IFNAME: usize = 15;

/// Configuration of one VM.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VmConfig {
    /// Unique name of the VM.
    pub name: String,
    /// Name of the TAP that the VM's VMM has open.
    pub tap: String,
    /// MAC address of the guest; when given, frames from other addresses are dropped.
    pub mac: Option<[u8; 6]>,
    /// IPv4 address of the guest.
    pub ip: Ipv4Addr,
    /// Whether the guest has IPv6; `None`: as for all VMs.
    pub ipv6: Option<Ipv6Mode>,
    /// Prefix of the guest's IPv6 addresses, of 64 bits; `None`: as for all VMs.
    pub ipv6_prefix: Option<Ipv6Net>,
    /// Name of the only device by which its flows leave; `None`: as for all VMs.
    pub uplink: Option<String>,
    /// Source addresses toward the world, which no other VM has; none: those of its policy.
    pub nat_addresses: AddressPool,
    /// Policy and quotas given for this VM alone.
    pub flags: VmFlags,
    /// Ports of the host that lead to the guest.
    pub forwards: Vec<Forward>,
    /// Ports of the gateway that lead to the host's loopback, before those of the policy.
    pub host_loopback: Vec<LoopbackPorts>,
    /// Silence after which it is idle, seconds; 0: it is not told. `None`: as for all VMs.
    pub idle_after: Option<u32>,
    /// Labels, which slipgate does not interpret.
    pub labels: BTreeMap<String, String>,
    /// Whether it is served for as long as a client lives.
    pub tied: bool,
    /// Name of its policy; `None`: the one without a name.
    pub policy: Option<String>,
    /// Quotas of the VM.
    pub limits: Limits,
}

/// Policy and quotas given for one VM.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct VmFlags {
    /// Name of the policy.
    pub policy: Option<String>,
    /// Text of a policy for this VM, in place of `policy`.
    pub inline_policy: Option<String>,
    /// Quotas that replace those of the policy.
    pub quotas: Quotas,
}

impl VmFlags {
    /// Name of the policy, which is made of the text if the VM's definition contains one.
    pub fn policy_name(&self) -> Option<String> {
        let inline = self.inline_policy.as_deref().map(inline_name);
        inline.or_else(|| self.policy.clone())
    }
}

impl VmConfig {
    /// Makes the configuration of a VM without settings of its own.
    pub fn new(name: &str, tap: &str, ip: Ipv4Addr) -> Self {
        Self {
            name: name.to_owned(),
            tap: tap.to_owned(),
            mac: None,
            ip,
            ipv6: None,
            ipv6_prefix: None,
            uplink: None,
            nat_addresses: AddressPool::default(),
            flags: VmFlags::default(),
            forwards: Vec::new(),
            host_loopback: Vec::new(),
            idle_after: None,
            labels: BTreeMap::new(),
            tied: false,
            policy: None,
            limits: Limits::default(),
        }
    }

    /// Checks the definition that a client gave.
    ///
    /// # Errors
    /// A value can't be used; the error names the field.
    pub fn checked(definition: &VmDefinition, network: &GuestNetwork) -> Result<Self, ConfigError> {
        let VmDefinition {
            name,
            tap,
            mac,
            ip,
            ipv6,
            ipv6_prefix,
            policy,
            inline_policy,
            uplink,
            nat_addresses,
            quotas,
            forwards,
            host_loopback,
            idle_after,
            labels,
            tied,
        } = definition;
        check_name("name", name, name)?;
        check_tap("tap", tap, tap)?;
        let ip = ip.unwrap_or(network.guest);
        network.check_guest("ip", ip)?;
        check_labels(labels)?;
        if let Some(uplink) = uplink {
            check_uplink(uplink, tap)?;
        }
        if let Some(text) = inline_policy {
            if let Some(name) = policy {
                return Err(ConfigError::new(
                    "policy",
                    name,
                    "the definition contains a policy too",
                    "give one of the two",
                ));
            }
            check_inline(text)?;
        }
        let forwards = forwards_of_vm(forwards, name)?;
        if forwards.len() > MAX_VM_FORWARDS {
            return Err(ConfigError::new(
                "forwards",
                format!("({} ports)", forwards.len()),
                format!("a VM has {MAX_VM_FORWARDS} forwarded ports at most"),
                "leave some out",
            ));
        }
        let prefix = ipv6_prefix.as_deref();
        let is_routed = ipv6.unwrap_or(network.ipv6) == Ipv6Mode::Routed;
        let prefix = prefix.map(|prefix| match is_routed {
            true => check_routed_prefix("ipv6_prefix", prefix),
            false => check_ipv6_prefix("ipv6_prefix", prefix),
        });
        let mac = mac.as_deref().map(|mac| parse_mac("mac", mac, mac));
        Ok(Self {
            mac: mac.transpose()?,
            ipv6: *ipv6,
            ipv6_prefix: prefix.transpose()?,
            flags: VmFlags {
                policy: policy.clone(),
                inline_policy: inline_policy.clone(),
                quotas: *quotas,
            },
            uplink: uplink.clone(),
            nat_addresses: pool_of_vm(nat_addresses)?,
            forwards,
            host_loopback: loopback_of_vm(host_loopback)?,
            idle_after: *idle_after,
            labels: labels.clone(),
            tied: *tied,
            ..Self::new(name, tap, ip)
        })
    }

    /// Returns the definition that a client would give for this VM.
    pub fn definition(&self) -> VmDefinition {
        let specs = self.forwards.iter().map(|forward| forward.spec.clone());
        let mut specs: Vec<String> = specs.collect();
        // A range is several ports.
        specs.dedup();
        VmDefinition {
            name: self.name.clone(),
            tap: self.tap.clone(),
            mac: self
                .mac
                .map(|mac| mac.map(|byte| format!("{byte:02x}")).join(":")),
            ip: Some(self.ip),
            ipv6: self.ipv6,
            ipv6_prefix: self.ipv6_prefix.map(|prefix| prefix.to_string()),
            policy: self.flags.policy.clone(),
            inline_policy: self.flags.inline_policy.clone(),
            uplink: self.uplink.clone(),
            nat_addresses: self.nat_addresses.texts(),
            quotas: self.flags.quotas,
            forwards: specs,
            host_loopback: self.host_loopback.iter().map(LoopbackPorts::spec).collect(),
            idle_after: self.idle_after,
            labels: self.labels.clone(),
            tied: self.tied,
        }
    }
}

/// Checks that a VM's own uplink can be a device of the host that is not slipgate's, nor its TAP.
fn check_uplink(uplink: &str, tap: &str) -> Result<(), ConfigError> {
    check_device("uplink", uplink, uplink)?;
    let problem = match uplink {
        _ if uplink == tap => "it is its own TAP",
        _ if is_port_device(uplink) => "it is a device of slipgate's own",
        _ => return Ok(()),
    };
    let remedy = "give the device that leads to the world, or leave it out for the daemon's";
    Err(ConfigError::new("uplink", uplink, problem, remedy))
}

fn check_labels(labels: &BTreeMap<String, String>) -> Result<(), ConfigError> {
    if labels.len() > MAX_LABELS {
        return Err(ConfigError::new(
            "labels",
            labels.len(),
            format!("a VM has {MAX_LABELS} labels at most"),
            "leave some out",
        ));
    }
    labels
        .iter()
        .try_for_each(|(key, value)| check_label("labels", key, value))
}

/// Checks a label, whose key and value are as Kubernetes has them, by `flag`: letters, digits and
/// `-_.`, with a letter or digit at both ends; a key may have a prefix and a slash, and a value may
/// be empty.
///
/// # Errors
/// The key or the value has another form, or is too long.
pub fn check_label(flag: &'static str, key: &str, value: &str) -> Result<(), ConfigError> {
    let is_word = |text: &str| {
        let bytes = text.as_bytes();
        let ends = [bytes.first(), bytes.last()];
        let is_inner = |b: &u8| b.is_ascii_alphanumeric() || b"-_.".contains(b);
        ends.iter()
            .all(|end| end.is_some_and(u8::is_ascii_alphanumeric))
            && bytes.iter().all(is_inner)
    };
    let (prefix, name) = key.split_once('/').unwrap_or(("x", key));
    let is_key = is_word(prefix) && is_word(name) && key.len() <= MAX_LABEL_BYTES;
    let is_value = value.is_empty() || is_word(value) && value.len() <= MAX_LABEL_BYTES;
    if is_key && is_value {
        return Ok(());
    }
    Err(ConfigError::new(
        flag,
        format!("{key}={value}"),
        format!(
            "the {} has another form than a label's",
            if is_key { "value" } else { "key" }
        ),
        format!(
            "give a key like tenant or example.com/tenant and a value like a-1: letters, digits \
             and -_. between them, {MAX_LABEL_BYTES} bytes at most"
        ),
    ))
}

/// Parses the MAC address of a guest.
///
/// # Errors
/// It is not the MAC address of one device, by `flag`'s value `given`.
pub fn parse_mac(flag: &'static str, given: &str, text: &str) -> Result<[u8; 6], ConfigError> {
    unicast_mac(text).ok_or_else(|| {
        ConfigError::new(
            flag,
            given,
            format!("{text:?} is not the MAC of one device"),
            "give six bytes like 52:54:00:12:34:56, the first one even",
        )
    })
}

/// Parses a unicast MAC address that is not zero.
fn unicast_mac(text: &str) -> Option<[u8; 6]> {
    let mut mac = [0; 6];
    let mut parts = text.split([':', '-']);
    for byte in &mut mac {
        let part = parts.next()?;
        if part.len() > 2 {
            return None;
        }
        *byte = u8::from_str_radix(part, 16).ok()?;
    }
    (parts.next().is_none() && mac[0] & 1 == 0 && mac != [0; 6]).then_some(mac)
}

/// Checks that a name can be a guest's TAP's: a valid device name that is not reserved for
/// slipgate's own devices.
///
/// # Errors
/// It can't, by `flag`'s value `given`.
pub fn check_tap(flag: &'static str, given: &str, tap: &str) -> Result<(), ConfigError> {
    check_device(flag, given, tap)?;
    if is_port_device(tap) {
        let problem = format!("{tap} is a name of slipgate's own devices");
        let remedy = "call the TAP something else, like sgvm0";
        return Err(ConfigError::new(flag, given, problem, remedy));
    }
    Ok(())
}

/// Checks that the kernel accepts a name for a device.
///
/// # Errors
/// It does not; the error names `flag` and its value `given`.
pub fn check_device(flag: &'static str, given: &str, device: &str) -> Result<(), ConfigError> {
    let bad = |c: char| c == '/' || c == ':' || c.is_whitespace() || c.is_control();
    if device.is_empty()
        || device.len() > MAX_IFNAME
        || device == "."
        || device == ".."
        || device.contains(bad)
    {
        return Err(ConfigError::new(
            flag,
            given,
            format!("{device:?} can't be a network device"),
            "give a name of 1 to 15 characters as `ip link` shows it",
        ));
    }
    Ok(())
}
