//! Request of a container runtime: the command and the attachment by the environment, the network's
//! configuration by stdin.
use std::{
    collections::BTreeMap,
    env,
    io::Read as _,
    net::{IpAddr, Ipv4Addr},
    path::PathBuf,
};

use serde::{Deserialize, de::IgnoredAny};
use serde_json::{Map, Value};
use sha2::{Digest as _, Sha256};
use slipgate_broker::config::check_label;
use slipgate_policy::document::Quotas;

use super::answer::{Failure, SUPPORTED, code};

/// Variable with the command.
pub(super) const COMMAND: &str = "CNI_COMMAND";
/// Longest name of a VM, bytes.
const MAX_NAME: usize = 63;
/// Key of the configuration with the attachments that GC leaves.
const VALID_ATTACHMENTS: &str = "cni.dev/valid-attachments";
/// Keys of the configuration that begin so are the specification's.
const SPECIFIED: &str = "cni.dev/";

/// A request, checked but for what depends on this host.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) command: Command,
    /// Path of the container's network namespace, where the runtime names one.
    pub(super) netns: Option<PathBuf>,
    pub(super) config: Config,
    valid_attachments: Option<Value>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Command {
    Add(Attachment),
    Del(Attachment),
    Check(Attachment),
    Gc,
    Status,
    Version,
}

/// An interface of a container.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Attachment {
    pub(super) container: String,
    pub(super) ifname: String,
    pub(super) args: Arguments,
}

/// Parameters of one attachment, from `CNI_ARGS`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Arguments {
    mac: Option<String>,
    ip: Option<Ipv4Addr>,
    /// User and group that may open the TAP.
    pub(super) user: Option<u32>,
    pub(super) group: Option<u32>,
    pub(super) labels: BTreeMap<String, String>,
}

/// A network's configuration. A key that is not known is refused: a policy that is misspelt would be
/// none.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Config {
    #[serde(default)]
    pub(super) cni_version: String,
    name: Option<String>,
    /// The VMs' policy. `None`: the daemon's default policy.
    policy: Option<Policy>,
    /// The only device by which the VMs' flows leave. `None`: the daemon's.
    pub(super) uplink: Option<String>,
    /// Ports of the gateway that lead to the host's loopback.
    #[serde(default)]
    pub(super) host_loopback: Vec<String>,
    #[serde(default)]
    pub(super) labels: BTreeMap<String, String>,
    /// Limits of each VM, with the keys of a policy file.
    #[serde(default)]
    pub(super) quotas: Quotas,
    /// MAC of all guests, which is enforced. `None`: one is suggested for each, and any passes.
    mac: Option<String>,
    /// Address of all guests. `None`: the daemon's.
    ip: Option<Ipv4Addr>,
    /// MTU of the TAPs, L3 bytes.
    pub(super) mtu: Option<u32>,
    /// User and group that may open the TAPs: the jailer's.
    pub(super) user: Option<u32>,
    pub(super) group: Option<u32>,
    /// Whether VMMs open several queues of a TAP.
    #[serde(default)]
    pub(super) multi_queue: bool,
    /// Path of the network namespace that the daemon serves.
    pub(super) netns: Option<PathBuf>,
    /// Folder for Kata's files (`dan_conf` in its configuration).
    pub(super) kata_dan: Option<PathBuf>,
    /// Directory in bpffs that the daemon was given.
    pub(super) pin_dir: Option<PathBuf>,
    #[serde(default)]
    runtime_config: RuntimeConfig,
    pub(super) prev_result: Option<Value>,
    ipam: Option<Value>,

    // The specification's, which mean nothing here.
    #[serde(rename = "type")]
    _type: Option<IgnoredAny>,
    #[serde(rename = "cniVersions")]
    _cni_versions: Option<IgnoredAny>,
    #[serde(rename = "disableCheck")]
    _disable_check: Option<IgnoredAny>,
    #[serde(rename = "disableGC")]
    _disable_gc: Option<IgnoredAny>,
    #[serde(rename = "capabilities")]
    _capabilities: Option<IgnoredAny>,
    #[serde(rename = "args")]
    _args: Option<IgnoredAny>,
    #[serde(rename = "dns")]
    _dns: Option<IgnoredAny>,
    #[serde(rename = "ipMasq")]
    _ip_masq: Option<IgnoredAny>,
}

/// Parameters of one attachment, from the runtime's capabilities.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct RuntimeConfig {
    mac: Option<String>,
    // A list that a runtime in Go has left empty is null.
    ips: Option<Vec<String>>,
    port_mappings: Option<Vec<PortMapping>>,
}

/// A policy's name, or an object with the keys of `[policy.NAME]` in a policy file.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Policy {
    Name(String),
    Inline(Map<String, Value>),
}

/// A port of the host that leads to the guest: the capability `portMappings`. containerd writes the
/// keys with a capital, which the decoder of plugins in Go passes over.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PortMapping {
    /// 0: the runtime has mapped nothing.
    #[serde(alias = "HostPort")]
    host_port: u16,
    #[serde(alias = "ContainerPort")]
    container_port: u16,
    /// tcp, if it is left out.
    #[serde(alias = "Protocol")]
    protocol: Option<String>,
    /// Address of the host; any, if it is left out.
    #[serde(rename = "hostIP", alias = "HostIP")]
    host_ip: Option<String>,
}

impl Request {
    /// Reads environment and stdin. An error comes with the version that it is to be told in.
    pub(super) fn read() -> Result<Self, (String, Failure)> {
        let mut text = String::new();
        let read = std::io::stdin().read_to_string(&mut text);
        let variables = env::vars().filter(|(name, _)| name.starts_with("CNI_"));
        match read {
            Ok(_) => Self::of(&variables.collect(), &text),
            Err(e) => {
                let failure = Failure::new(code::IO, "reading the configuration from stdin");
                Err((newest(), failure.because(&e)))
            }
        }
    }

    /// The request of these variables and this configuration.
    pub(super) fn of(
        variables: &BTreeMap<String, String>,
        text: &str,
    ) -> Result<Self, (String, Failure)> {
        let decode = |e: serde_json::Error| {
            let failure = Failure::new(code::DECODE, "the configuration on stdin is not valid");
            failure.because(&e)
        };
        let mut keys: Map<String, Value> =
            serde_json::from_str(text).map_err(|e| (newest(), decode(e)))?;
        let version = keys.get("cniVersion").and_then(Value::as_str);
        let version = version.unwrap_or("0.1.0").to_owned();
        let with_version = |failure| (version.clone(), failure);
        let valid_attachments = keys.remove(VALID_ATTACHMENTS);
        keys.retain(|key, _| !key.starts_with(SPECIFIED));
        let config: Config = serde_json::from_value(keys.into())
            .map_err(decode)
            .map_err(with_version)?;
        let command = Command::of(variables).map_err(with_version)?;
        if command != Command::Version && !SUPPORTED.contains(&version.as_str()) {
            let why = format!(
                "cniVersion {version} is not one of {}",
                SUPPORTED.join(", ")
            );
            return Err((newest(), Failure::new(code::VERSION, why)));
        }
        let ipam = config.ipam.as_ref().and_then(|ipam| ipam["type"].as_str());
        if ipam.is_some_and(|of| !of.is_empty()) {
            let why = "slipgate gives guests their addresses itself: leave ipam out";
            return Err(with_version(Failure::new(code::CONFIG, why)));
        }
        let netns = variables.get("CNI_NETNS").filter(|path| !path.is_empty());
        Ok(Self {
            command,
            netns: netns.map(PathBuf::from),
            config,
            valid_attachments,
        })
    }

    /// The attachments that GC leaves.
    pub(super) fn valid_attachments(&self) -> Result<Vec<Attachment>, Failure> {
        let wrong = || {
            let what = format!("GC needs {VALID_ATTACHMENTS}, a list of containerID and ifname");
            Failure::new(code::CONFIG, what)
        };
        let all = self.valid_attachments.as_ref().and_then(Value::as_array);
        let each = all.ok_or_else(wrong)?.iter().map(|valid| {
            let text = |key: &str| valid[key].as_str().map(str::to_owned).ok_or_else(wrong);
            Attachment::checked(text("containerID")?, text("ifname")?, Arguments::default())
        });
        each.collect()
    }
}

impl Command {
    fn of(variables: &BTreeMap<String, String>) -> Result<Self, Failure> {
        let get = |name: &str| {
            let value = variables.get(name).filter(|value| !value.is_empty());
            value.cloned().ok_or_else(|| {
                Failure::new(code::ENVIRONMENT, format!("the variable {name} is not set"))
            })
        };
        let attachment = || {
            let args = variables.get("CNI_ARGS").map_or("", String::as_str);
            Attachment::checked(
                get("CNI_CONTAINERID")?,
                get("CNI_IFNAME")?,
                Arguments::of(args)?,
            )
        };
        Ok(match get(COMMAND)?.as_str() {
            "ADD" => Self::Add(attachment()?),
            "DEL" => Self::Del(attachment()?),
            "CHECK" => Self::Check(attachment()?),
            "GC" => Self::Gc,
            "STATUS" => Self::Status,
            "VERSION" => Self::Version,
            other => {
                let why = format!("{COMMAND}={other}: no command of this plugin");
                return Err(Failure::new(code::ENVIRONMENT, why));
            }
        })
    }
}

impl Config {
    /// Returns the name of the network.
    pub(super) fn network(&self) -> Result<&str, Failure> {
        let name = self.name.as_deref().filter(|name| !name.is_empty());
        name.ok_or_else(|| Failure::new(code::CONFIG, "the configuration has no name"))
    }

    /// Name of the VMs' policy, or its text.
    pub(super) fn policy(&self) -> Result<(Option<String>, Option<String>), Failure> {
        match &self.policy {
            None => Ok((None, None)),
            Some(Policy::Name(name)) => Ok((Some(name.clone()), None)),
            Some(Policy::Inline(policy)) => match toml::to_string(policy) {
                Ok(text) => Ok((None, Some(text))),
                Err(e) => {
                    let why = "policy: a value has no form in a policy file";
                    Err(Failure::new(code::CONFIG, why).because(&e))
                }
            },
        }
    }

    /// Ports of the host that lead to the guest, in the form of `--forward`.
    pub(super) fn forwards(&self) -> Result<Vec<String>, Failure> {
        let mappings = self.runtime_config.port_mappings.iter().flatten();
        mappings
            .filter(|mapping| mapping.host_port != 0)
            .map(PortMapping::forward)
            .collect()
    }
}

impl PortMapping {
    fn forward(&self) -> Result<String, Failure> {
        let wrong = |what: &str, given: &str, remedy: &str| {
            let why = format!("runtimeConfig.portMappings: {what} {given}: {remedy}");
            Err(Failure::new(code::CONFIG, why))
        };
        let protocol = self.protocol.as_deref().unwrap_or("tcp").to_lowercase();
        if !["tcp", "udp"].contains(&protocol.as_str()) {
            return wrong("protocol", &protocol, "give tcp or udp");
        }
        let host = match self.host_ip.as_deref().unwrap_or_default() {
            "" | "::" | "0.0.0.0" => String::new(),
            given => match given.parse() {
                Ok(IpAddr::V4(address)) => format!("{address}:"),
                Ok(IpAddr::V6(address)) => format!("[{address}]:"),
                Err(_) => return wrong("hostIP", given, "give an address of the host"),
            },
        };
        let (from, to) = (self.host_port, self.container_port);
        Ok(format!("{protocol}:{host}{from}:{to}"))
    }
}

impl Attachment {
    /// An attachment whose names are such as the specification allows. They become parts of names of
    /// files and devices.
    fn checked(container: String, ifname: String, args: Arguments) -> Result<Self, Failure> {
        let plain = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
        let is_id = container.starts_with(|c: char| c.is_ascii_alphanumeric());
        if !is_id || !container.chars().all(plain) {
            let why = format!(
                "CNI_CONTAINERID={container}: give letters, digits, '_', '.' and '-', the first \
                 a letter or digit"
            );
            return Err(Failure::new(code::ENVIRONMENT, why));
        }
        let bad = |c: char| c == '/' || c == ':' || c.is_whitespace();
        if ifname.len() > 15 || ifname == "." || ifname == ".." || ifname.contains(bad) {
            let why = format!("CNI_IFNAME={ifname}: that is no name of an interface");
            return Err(Failure::new(code::ENVIRONMENT, why));
        }
        Ok(Self {
            container,
            ifname,
            args,
        })
    }

    /// The name of its VM: as the runtime calls it where that fits.
    pub(super) fn vm(&self, network: &str) -> String {
        let plain = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
        let name = format!("{}.{}", self.container, self.ifname);
        if name.len() <= MAX_NAME && name.chars().all(plain) {
            return name;
        }
        let begins: String = self.container.chars().take(40).collect();
        format!("{begins}.{}", &self.digest(network)[..16])
    }

    /// The name of its TAP.
    pub(super) fn tap(&self, network: &str) -> String {
        format!("sg{}", &self.digest(network)[..12])
    }

    /// A MAC of its own, locally administered.
    pub(super) fn suggested_mac(&self, network: &str) -> String {
        let digest = self.digest(network);
        let bytes: Vec<&str> = (0..5).map(|at| &digest[2 * at..][..2]).collect();
        format!("02:{}", bytes.join(":"))
    }

    fn digest(&self, network: &str) -> String {
        digest(&[network, &self.container, &self.ifname])
    }

    /// The MAC that the guest must have, in the order of who knows best.
    pub(super) fn mac(&self, config: &Config) -> Option<String> {
        let told = [&self.args.mac, &config.runtime_config.mac, &config.mac];
        told.into_iter().flatten().next().cloned()
    }

    /// The address that the guest is to have; `None`: the daemon's choice.
    pub(super) fn ip(&self, config: &Config) -> Result<Option<Ipv4Addr>, Failure> {
        let told = match config.runtime_config.ips.as_deref().unwrap_or_default() {
            [] => None,
            [ip] => Some(address("runtimeConfig.ips", ip)?),
            _ => {
                let why = "runtimeConfig.ips: a guest has one address";
                return Err(Failure::new(code::CONFIG, why));
            }
        };
        Ok(self.args.ip.or(told).or(config.ip))
    }
}

impl Arguments {
    /// Reads `KEY=VALUE;KEY=VALUE`. What tc-redirect-tap knows is known by the same names.
    fn of(text: &str) -> Result<Self, Failure> {
        let mut args = Self::default();
        let mut unknown = Vec::new();
        let mut ignores_unknown = false;
        for pair in text.split(';').filter(|pair| !pair.is_empty()) {
            let wrong =
                || Failure::new(code::ENVIRONMENT, format!("CNI_ARGS: {pair} is not valid"));
            let (key, value) = pair.split_once('=').ok_or_else(wrong)?;
            let number = || value.parse().map(Some).map_err(|_| wrong());
            match key {
                "IgnoreUnknown" => ignores_unknown = matches!(value, "1" | "true" | "True"),
                "MAC" | "TC_REDIRECT_TAP_GUEST_MAC" => args.mac = Some(value.to_owned()),
                "IP" => args.ip = Some(address("CNI_ARGS: IP", value)?),
                "TC_REDIRECT_TAP_UID" => args.user = number()?,
                "TC_REDIRECT_TAP_GID" => args.group = number()?,
                "K8S_POD_NAMESPACE" | "K8S_POD_NAME" => {
                    args.labels.insert(label_of(key).into(), short(value));
                }
                _ => unknown.push(key.to_owned()),
            }
        }
        match ignores_unknown || unknown.is_empty() {
            true => Ok(args),
            false => Err(Failure::new(
                code::ENVIRONMENT,
                format!(
                    "CNI_ARGS: {} is not known; say IgnoreUnknown=1 to have it passed over",
                    unknown.join(", ")
                ),
            )),
        }
    }
}

fn label_of(argument: &str) -> &'static str {
    match argument {
        "K8S_POD_NAME" => "k8s.pod",
        _ => "k8s.namespace",
    }
}

/// An address, with or without a prefix length, which is the daemon's.
fn address(what: &str, text: &str) -> Result<Ipv4Addr, Failure> {
    let (address, _) = text.split_once('/').unwrap_or((text, ""));
    address.parse().map_err(|_| {
        let why = format!("{what}: {text} is no IPv4 address");
        Failure::new(code::CONFIG, why)
    })
}

/// A text as a label's value, which is short: its own, or its beginning and a digest.
pub(super) fn short(text: &str) -> String {
    if check_label("name", "network", text).is_ok() {
        return text.to_owned();
    }
    let plain = text.chars().filter(char::is_ascii_alphanumeric);
    let begins: String = plain.take(40).collect();
    let digest = &digest(&[text])[..16];
    match begins.as_str() {
        "" => digest.to_owned(),
        begins => format!("{begins}-{digest}"),
    }
}

/// Digest of texts, in hexadecimal digits.
fn digest(texts: &[&str]) -> String {
    let mut sha = Sha256::new();
    for text in texts {
        sha.update(text);
        sha.update([0]);
    }
    sha.finalize().iter().map(|b| format!("{b:02x}")).collect()
}

fn newest() -> String {
    SUPPORTED[SUPPORTED.len() - 1].to_owned()
}

#[cfg(test)]
#[path = "request_test.rs"]
mod tests;
