//! A VM that is to be served.
use std::{collections::BTreeMap, net::Ipv4Addr};

use slipgate_abi::portframe::is_port_device;
use slipgate_ipc::client::{MAX_LABEL_BYTES, MAX_LABELS, VmDefinition};
use slipgate_policy::document::{ConfigError, Limits, Quotas, check_name};

use super::GuestNetwork;

/// Longest name of a network device, bytes (IFNAMSIZ less the final zero).
const MAX_IFNAME: usize = 15;

/// Configuration of one VM.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VmConfig {
    /// Unique name of the VM.
    pub name: String,
    /// The TAP that its VMM has open.
    pub tap: String,
    /// MAC address of the guest; when given, frames from other addresses are dropped.
    pub mac: Option<[u8; 6]>,
    /// IPv4 address of the guest.
    pub ip: Ipv4Addr,
    /// Policy and quotas given for this VM alone.
    pub typed: VmFlags,
    /// Labels, which slipgate does not interpret.
    pub labels: BTreeMap<String, String>,
    /// Index of its policy among the process's policies.
    pub policy: u32,
    /// Quotas of the VM.
    pub limits: Limits,
}

/// Policy and quotas given for one VM.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct VmFlags {
    /// Name of the policy.
    pub policy: Option<String>,
    /// Quotas that replace those of the policy.
    pub quotas: Quotas,
}

impl VmConfig {
    /// Makes the configuration of a VM without settings of its own.
    pub fn new(name: &str, tap: &str, ip: Ipv4Addr) -> Self {
        Self {
            name: name.to_owned(),
            tap: tap.to_owned(),
            mac: None,
            ip,
            typed: VmFlags::default(),
            labels: BTreeMap::new(),
            policy: 0,
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
            policy,
            quotas,
            labels,
        } = definition;
        check_name("name", name, name)?;
        check_tap("tap", tap, tap)?;
        let ip = ip.unwrap_or(network.guest);
        network.check_guest("ip", ip)?;
        check_labels(labels)?;
        let mac = mac.as_deref().map(|mac| parse_mac("mac", mac, mac));
        Ok(Self {
            mac: mac.transpose()?,
            typed: VmFlags {
                policy: policy.clone(),
                quotas: *quotas,
            },
            labels: labels.clone(),
            ..Self::new(name, tap, ip)
        })
    }

    /// The definition that a client would give for this VM.
    pub fn definition(&self) -> VmDefinition {
        VmDefinition {
            name: self.name.clone(),
            tap: self.tap.clone(),
            mac: self
                .mac
                .map(|mac| mac.map(|byte| format!("{byte:02x}")).join(":")),
            ip: Some(self.ip),
            policy: self.typed.policy.clone(),
            quotas: self.typed.quotas,
            labels: self.labels.clone(),
        }
    }
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
    let fits = |text: &str| text.len() <= MAX_LABEL_BYTES && !text.contains(char::is_control);
    for (key, value) in labels {
        if key.is_empty() || !fits(key) || !fits(value) {
            return Err(ConfigError::new(
                "labels",
                format!("{key}={value}"),
                "a key or value is too long, or has control characters",
                format!(
                    "give a key of 1 to {MAX_LABEL_BYTES} bytes and a value of {MAX_LABEL_BYTES} at most"
                ),
            ));
        }
    }
    Ok(())
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

/// A unicast MAC that is not zero.
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

/// Checks that a name can be that of a guest's TAP: a device's name that is not one of slipgate's
/// own devices'.
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

/// Checks that the kernel would take a name for a device.
///
/// # Errors
/// It would not, by `flag`'s value `given`.
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
