//! `--vm name=a,tap=tap0[,mac=M][,ip=A][,max-flows=N][,policy=NAME]` and its short form `--tap
//! tap0`.
use slipgate_broker::config::{GuestNetwork, VmConfig, VmFlags, check_tap, parse_mac};
use slipgate_policy::document::{ConfigError, Count, Quotas, address, check_name};

/// Parses all VMs of the command line.
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
        let vm = VmConfig::new(tap, tap, network.guest);
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
        Some(text) => Some(parse_mac("--vm", spec, text)?),
    };
    let max_flows =
        match flows {
            None => None,
            Some(text) => Some(text.parse().ok().filter(|&n| n > 0).map(Count).ok_or_else(
                || {
                    err(
                        format!("max-flows={text} is no number of flows"),
                        "give a number from 1",
                    )
                },
            )?),
        };
    Ok(VmConfig {
        mac,
        flags: VmFlags {
            policy: policy.map(str::to_owned),
            inline_policy: None,
            quotas: Quotas {
                max_flows,
                ..Quotas::default()
            },
        },
        ..VmConfig::new(name, tap, ip)
    })
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
