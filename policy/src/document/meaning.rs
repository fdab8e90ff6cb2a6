//! Assignment of policies and quotas to VMs, from flags and a policy file together.
//!
//! Rules given as flags come before the file's, in every policy of it. A flag overrides the file's
//! value, and `--vm` of one VM overrides the flag.
use slipgate_abi::{AtEnd, VmRates};

use super::{
    error::ConfigError,
    file::PolicyFile,
    forward::{self, Forward},
    overrides::parse_resolvers,
    schema::{
        self, BytesEnd, BytesPer, Dns, Document, Egress, HostLoopback, Idle, NamedPolicy, Nat,
        Quotas, Resolvers, ResolversWord, Sleep, Timers,
    },
};
use crate::{DnsSettings, Resolvers as Asked};

/// Length of the longest name of a VM or a policy, bytes: it fits a VM's row in `VMS` with a final
/// zero.
const MAX_NAME: usize = 63;
/// Default limit of concurrent flows per VM.
const MAX_FLOWS: u32 = 16_384;
/// Default limit of new flows per second and VM.
const NEW_FLOWS_PER_SECOND: u32 = 2_000;

/// Resource limits of a VM.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Maximum number of concurrent flows.
    pub max_flows: u32,
    /// Average rate and burst of new flows per second.
    pub new_flows_per_second: u32,
    /// DNS questions per second; 0: no limit.
    pub dns_per_second: u32,
    /// Limits of bytes and packets per second.
    pub rates: VmRates,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_flows: MAX_FLOWS,
            new_flows_per_second: NEW_FLOWS_PER_SECOND,
            dns_per_second: 0,
            rates: VmRates::default(),
        }
    }
}

impl Limits {
    /// Replaces the limits that `by` gives.
    pub fn change(&mut self, by: &Quotas) {
        let counts = [
            (&mut self.max_flows, by.max_flows),
            (&mut self.new_flows_per_second, by.new_flows_per_second),
            (&mut self.dns_per_second, by.dns_per_second),
        ];
        for (own, said) in counts {
            *own = said.map_or(*own, |said| said.0);
        }
        let VmRates { tx, rx, budget } = &mut self.rates;
        let amounts = [
            (&mut tx.bytes_per_second, by.tx_bytes_per_second),
            (&mut rx.bytes_per_second, by.rx_bytes_per_second),
            (&mut tx.packets_per_second, by.tx_packets_per_second),
            (&mut rx.packets_per_second, by.rx_packets_per_second),
            (&mut tx.budget_bytes, by.tx_bytes),
            (&mut rx.budget_bytes, by.rx_bytes),
        ];
        if let Some(per) = by.bytes_per {
            budget.per_day = per == BytesPer::Day;
        }
        if let Some(end) = by.bytes_end {
            budget.at_end = match end {
                BytesEnd::Cut => AtEnd::Cut,
                BytesEnd::Refuse => AtEnd::Refuse,
                BytesEnd::Freeze => AtEnd::Freeze,
            };
        }
        for (own, said) in amounts {
            *own = said.map_or(*own, |said| said.0);
        }
    }
}

/// Returns the index of the policy of a VM known by name only. `default`: policy of VMs that name
/// none.
///
/// # Errors
/// The policy that is named does not exist, or the file has named policies only and none is named.
pub fn policy_in_file(
    file: &PolicyFile,
    vm: &str,
    default: Option<&str>,
) -> Result<u32, ConfigError> {
    let document = &file.document;
    let mut vms = document.vms.iter();
    let said = vms.find_map(|(name, policy)| (name.get_ref() == vm).then_some(policy.get_ref()));
    match said.map(String::as_str).or(default) {
        Some(name) => named(document, name)
            .map(|(place, _)| place)
            .ok_or_else(|| {
                let problem = format!("{} has no policy {name:?}, of {vm}", file.name());
                ConfigError::new("--policy", name, problem, "give one that both files have")
            }),
        None if !has_top_level(document) => {
            let problem = format!("it does not say which policy {vm} has");
            let remedy = "give --policy NAME, or write [vms]";
            Err(ConfigError::new("--policy", file.name(), problem, remedy))
        }
        None => Ok(0),
    }
}

/// Checks the parts of a file that do not depend on the VMs: `[vms]`, DNS settings and forwards.
/// Rules are checked when they are loaded.
///
/// # Errors
/// One of them cannot be used.
pub fn check_file(file: &PolicyFile) -> Result<(), ConfigError> {
    check_vms(file, |_| false)?;
    check_dns(file)?;
    let mut all = Vec::new();
    for entry in &file.document.forward {
        // The VM is not checked: any will do.
        let forward = schema::Forward {
            vm: None,
            ..entry.get_ref().clone()
        };
        // Each VM has its own addresses, so those of several may have the same port.
        let is_own = matches!(forward.address, Some(schema::ForwardAddress::Word(_)));
        let all = if is_own { &mut Vec::new() } else { &mut all };
        let added = forward::add(all, &forward.spec(), &["VM"]);
        added.map_err(|e| file.error(&entry.span(), e.problem, e.remedy))?;
    }
    Ok(())
}

pub(super) fn named<'d>(document: &'d Document, name: &str) -> Option<(u32, &'d NamedPolicy)> {
    let mut all = (1..).zip(&document.policy);
    all.find_map(|(place, (key, policy))| (key.get_ref() == name).then_some((place, policy)))
}

/// Whether the top level of a file is a policy. In a file with named policies it may be none.
pub fn has_top_level(document: &Document) -> bool {
    document.policy.is_empty()
        || document.default.is_some()
        || document.on_reload.is_some()
        || !document.rules.is_empty()
        || document.quotas != Quotas::default()
        || document.timers != Timers::default()
        || document.nat != Nat::default()
        || !document.nat_addresses.is_empty()
        || document.egress != Egress::default()
        || document.sleep != Sleep::default()
        || document.idle != Idle::default()
        || document.host_loopback != HostLoopback::default()
}

/// Returns the limits of a VM that has the policy at an index.
pub fn limits_in_file(file: &PolicyFile, policy: u32) -> Limits {
    let mut limits = Limits::default();
    limits.change(quotas_of(&file.document, policy));
    limits
}

/// Returns the quotas of a policy of the file by its name; `None`: of the one without a name.
pub fn quotas_named<'d>(document: &'d Document, policy: Option<&str>) -> &'d Quotas {
    let said = policy.and_then(|name| named(document, name));
    said.map_or(&document.quotas, |(_, policy)| &policy.quotas)
}

/// Returns the quotas of the policy at an index.
fn quotas_of(document: &Document, policy: u32) -> &Quotas {
    let named = (policy as usize).checked_sub(1);
    let named = named.and_then(|place| document.policy.values().nth(place));
    named.map_or(&document.quotas, |policy| &policy.quotas)
}

/// Checks the policies that `[vms]` names. An unknown VM there is no error: a file may serve
/// several command lines.
///
/// # Errors
/// The file has no policy of that name, and it is not among those that stand beside it.
pub fn check_vms(file: &PolicyFile, is_beside: impl Fn(&str) -> bool) -> Result<(), ConfigError> {
    for policy in file.document.vms.values() {
        if !is_beside(policy.get_ref()) && named(&file.document, policy.get_ref()).is_none() {
            let problem = format!("no policy {:?}", policy.get_ref());
            return Err(file.error(&policy.span(), problem, "write [policy.NAME] for it"));
        }
    }
    Ok(())
}

/// Whether the text is a word that stands for a list of resolvers.
fn is_word(text: &str) -> bool {
    ["none", "host"].contains(&text)
}

/// Returns the resolvers that a part of the file gives; `None` if it gives none.
fn resolvers_of(file: &PolicyFile, dns: &Dns) -> Result<Option<Asked>, ConfigError> {
    let Some(resolvers) = &dns.resolvers else {
        return Ok(None);
    };
    let in_file = |e: ConfigError| {
        let problem = format!("{:?}: {}", e.given(), e.problem);
        file.error(&resolvers.span(), problem, e.remedy)
    };
    match resolvers.get_ref() {
        Resolvers::Word(ResolversWord::Host) => Ok(Some(Asked::Host)),
        Resolvers::Word(ResolversWord::None) => Ok(Some(Asked::Nobody)),
        Resolvers::These(given) if given.is_empty() => Err(file.error(
            &resolvers.span(),
            "no resolver",
            "give one, or \"none\" to refuse every question",
        )),
        Resolvers::These(given) if given.iter().any(|one| is_word(one)) => Err(file.error(
            &resolvers.span(),
            "a list has addresses only",
            "write resolvers = \"none\" to refuse every question, or resolvers = \"host\" for the \
             host's; or leave these words out of the list",
        )),
        Resolvers::These(given) => {
            let these = parse_resolvers(given).map_err(in_file)?;
            Ok(Some(Asked::These(these)))
        }
    }
}

/// Checks the DNS settings of all policies in a file.
///
/// # Errors
/// A setting is out of range, or a resolver's address is invalid.
pub fn check_dns(file: &PolicyFile) -> Result<(), ConfigError> {
    let named = file.document.policy.values().map(|policy| &policy.dns);
    for dns in [&file.document.dns].into_iter().chain(named) {
        dns_settings(file, dns, None)?;
    }
    Ok(())
}

/// Returns the forwards of the flags, then those of the file. `vms`: the VMs' names, in order.
///
/// # Errors
/// A forward cannot be parsed, names an unknown VM, uses a host port twice, or there are too many.
pub fn forwards(
    typed: &[String],
    file: Option<&PolicyFile>,
    vms: &[&str],
) -> Result<Vec<Forward>, ConfigError> {
    let mut all = forward::parse(typed, vms)?;
    for entry in file.iter().flat_map(|file| &file.document.forward) {
        let in_file = |e: ConfigError| match file {
            Some(file) => file.error(&entry.span(), e.problem, e.remedy),
            None => e,
        };
        let spec = entry.get_ref().spec();
        forward::add(&mut all, &spec, vms).map_err(in_file)?;
    }
    Ok(all)
}

/// Returns the DNS settings of a policy. `typed`: the resolvers given by flags.
pub(super) fn dns_settings(
    file: &PolicyFile,
    dns: &Dns,
    typed: Option<Asked>,
) -> Result<DnsSettings, ConfigError> {
    let own = resolvers_of(file, dns)?;
    let of_file = resolvers_of(file, &file.document.dns)?;
    let mut settings = DnsSettings {
        resolvers: typed.or(own).or(of_file).unwrap_or_default(),
        types: dns.types.iter().map(|kind| kind.number()).collect(),
        ..Default::default()
    };
    if let Some(floor) = dns.ttl_floor_s {
        settings.ttl_floor_s = floor;
        settings.ttl_ceiling_s = settings.ttl_ceiling_s.max(floor);
    }
    if let Some(ceiling) = &dns.ttl_ceiling_s {
        settings.ttl_ceiling_s = *ceiling.get_ref();
        if settings.ttl_ceiling_s < settings.ttl_floor_s {
            let problem = format!(
                "ttl_ceiling_s is {}, below ttl_floor_s, which is {}",
                settings.ttl_ceiling_s, settings.ttl_floor_s
            );
            return Err(file.error(&ceiling.span(), problem, "give the floor or more"));
        }
    }
    if let Some(labels) = &dns.max_labels {
        settings.max_labels = *labels.get_ref();
        if !(1..=127).contains(&settings.max_labels) {
            let problem = format!("max_labels is {}", settings.max_labels);
            return Err(file.error(&labels.span(), problem, "give 1 to 127"));
        }
    }
    if let Some(octets) = &dns.max_label_octets {
        settings.max_label_octets = *octets.get_ref();
        if !(1..=63).contains(&settings.max_label_octets) {
            let problem = format!("max_label_octets is {}", settings.max_label_octets);
            return Err(file.error(&octets.span(), problem, "give 1 to 63"));
        }
    }
    if let Some(octets) = dns.new_name_octets_per_minute {
        settings.new_names.octets_per_minute = octets.0;
    }
    if let Some(octets) = dns.new_name_burst_octets {
        settings.new_names.burst_octets = octets.0;
    }
    Ok(settings)
}

/// Checks a name of a VM or a policy, and returns it.
///
/// # Errors
/// The name is empty, too long, or has characters that names must not have.
pub fn check_name<'a>(
    flag: &'static str,
    given: &str,
    name: &'a str,
) -> Result<&'a str, ConfigError> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if name.is_empty() || name.len() > MAX_NAME || !name.chars().all(plain) {
        return Err(ConfigError::new(
            flag,
            given,
            format!("{name:?} can't be a name"),
            "give 1 to 63 letters, digits, '-', '_' or '.'",
        ));
    }
    Ok(name)
}
