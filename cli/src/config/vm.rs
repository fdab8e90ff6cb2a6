//! `--vm name=a,tap=tap0[,mac=M][,ip=A][,max-flows=N][,policy=NAME]` and its short form `--tap tap0`.
use slipgate_abi::portframe::is_port_device;
use slipgate_broker::config::{GuestNetwork, VmConfig, VmFlags};
use slipgate_policy::document::{ConfigError, Limits, address, check_name};

/// Longest name of a network device, bytes (IFNAMSIZ less the final zero).
const MAX_IFNAME: usize = 15;

/// All VMs of the command line.
pub(super) fn parse(
    specs: &[String],
    taps: &[String],
    network: &GuestNetwork,
) -> Result<Vec<VmConfig>, ConfigError> {
    let mut vms: Vec<VmConfig> = Vec::new();
    for spec in specs {
        let vm = parse_spec(spec, network)?;
        push(&mut vms, "--vm", spec, vm)?;
    }
    for tap in taps {
        check_tap("--tap", tap, tap)?;
        check_name_of_tap("--tap", tap, tap)?;
        let vm = VmConfig {
            name: tap.clone(),
            tap: tap.clone(),
            mac: None,
            ip: network.guest,
            typed: VmFlags::default(),
            policy: 0,
            limits: Limits::default(),
        };
        push(&mut vms, "--tap", tap, vm)?;
    }
    if vms.is_empty() {
        return Err(ConfigError::new(
            "--vm",
            "(nothing)",
            "there is no VM to serve",
            "give --tap IF or --vm name=NAME,tap=IF",
        ));
    }
    Ok(vms)
}

fn push(
    vms: &mut Vec<VmConfig>,
    flag: &'static str,
    given: &str,
    vm: VmConfig,
) -> Result<(), ConfigError> {
    if vms.iter().any(|v| v.name == vm.name) {
        return Err(ConfigError::new(
            flag,
            given,
            format!("the name {} is taken", vm.name),
            "give each VM its own name",
        ));
    }
    if vms.iter().any(|v| v.tap == vm.tap) {
        return Err(ConfigError::new(
            flag,
            given,
            format!("the TAP {} is another VM's", vm.tap),
            "give each VM its own TAP",
        ));
    }
    vms.push(vm);
    Ok(())
}

fn parse_spec(spec: &str, network: &GuestNetwork) -> Result<VmConfig, ConfigError> {
    let err = |problem: String, remedy: &str| ConfigError::new("--vm", spec, problem, remedy);
    let (mut name, mut tap, mut mac, mut ip) = (None, None, None, None);
    let (mut flows, mut policy) = (None, None);
    for part in spec.split(',') {
        let Some((key, value)) = part.split_once('=') else {
            return Err(err(
                format!("{part:?} is not KEY=VALUE"),
                "give name=NAME,tap=IF[,mac=M][,ip=A][,max-flows=N][,policy=NAME]",
            ));
        };
        let seen = match key {
            "name" => name.replace(value).is_some(),
            "tap" => tap.replace(value).is_some(),
            "mac" => mac.replace(value).is_some(),
            "ip" => ip.replace(value).is_some(),
            "max-flows" => flows.replace(value).is_some(),
            "policy" => policy.replace(value).is_some(),
            _ => {
                return Err(err(
                    format!("no key {key:?}"),
                    "there are name, tap, mac, ip, max-flows, policy",
                ));
            }
        };
        if seen {
            return Err(err(format!("{key} is given twice"), "give it once"));
        }
    }
    let tap = tap.ok_or_else(|| err("no TAP".into(), "add tap=IF"))?;
    check_tap("--vm", spec, tap)?;
    let name = match name {
        Some(name) => check_name("--vm", spec, name)?,
        None => check_name_of_tap("--vm", spec, tap)?,
    };
    let ip = match ip {
        None => network.guest,
        Some(text) => {
            let ip = address("--vm", text)?;
            network.check_guest("--vm", ip)?;
            ip
        }
    };
    let mac = match mac {
        None => None,
        Some(text) => Some(self::mac("--vm", spec, text)?),
    };
    let max_flows = match flows {
        None => None,
        Some(text) => Some(text.parse().ok().filter(|&n| n > 0).ok_or_else(|| {
            err(
                format!("max-flows={text} is no number of flows"),
                "give a number from 1",
            )
        })?),
    };
    Ok(VmConfig {
        name: name.to_owned(),
        tap: tap.to_owned(),
        mac,
        ip,
        typed: VmFlags {
            policy: policy.map(str::to_owned),
            max_flows,
        },
        policy: 0,
        limits: Limits::default(),
    })
}

/// The MAC of a guest.
pub(super) fn mac(flag: &'static str, given: &str, text: &str) -> Result<[u8; 6], ConfigError> {
    parse_mac(text).ok_or_else(|| {
        ConfigError::new(
            flag,
            given,
            format!("{text:?} is not the MAC of one device"),
            "give six bytes like 52:54:00:12:34:56, the first one even",
        )
    })
}

/// A unicast MAC that is not zero.
fn parse_mac(text: &str) -> Option<[u8; 6]> {
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

/// The name of a VM that is called as its TAP.
fn check_name_of_tap<'a>(
    flag: &'static str,
    given: &str,
    tap: &'a str,
) -> Result<&'a str, ConfigError> {
    check_name(flag, given, tap).map_err(|e| {
        let remedy = format!("name the VM: --vm name=NAME,tap={tap}");
        let problem = format!("{}, as the VM would be called", e.problem);
        ConfigError::new(flag, given, problem, remedy)
    })
}

/// Whether it can be a guest's TAP: a device's name that is not one of our own devices'.
pub(super) fn check_tap(flag: &'static str, given: &str, tap: &str) -> Result<(), ConfigError> {
    check_device(flag, given, tap)?;
    if is_port_device(tap) {
        let problem = format!("{tap} is a name of slipgate's own devices");
        let remedy = "call the TAP something else, like sgvm0";
        return Err(ConfigError::new(flag, given, problem, remedy));
    }
    Ok(())
}

/// Whether the kernel would take it as a device's name.
pub(super) fn check_device(
    flag: &'static str,
    given: &str,
    device: &str,
) -> Result<(), ConfigError> {
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
