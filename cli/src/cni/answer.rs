//! Output for the container runtime on stdout: results in the form of its version, and errors.
use std::{error::Error, net::Ipv4Addr};

use serde_json::{Value, json};
use slipgate_ipc::client::GuestNetwork;

/// Versions of the specification, oldest first. Older ones have no interfaces in their results.
pub(super) const SUPPORTED: [&str; 5] = ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];

/// Codes of errors: the specification's up to 99, then ours.
pub(super) mod code {
    pub(crate) const VERSION: u32 = 1;
    pub(crate) const ENVIRONMENT: u32 = 4;
    pub(crate) const IO: u32 = 5;
    pub(crate) const DECODE: u32 = 6;
    pub(crate) const CONFIG: u32 = 7;
    pub(crate) const TRY_AGAIN: u32 = 11;
    pub(crate) const UNAVAILABLE: u32 = 50;
    /// As above, and guests that are there reach nothing new.
    pub(crate) const LIMITED: u32 = 51;
    /// The attachment is there already.
    pub(crate) const EXISTS: u32 = 100;
    /// The present network differs from the one that ADD made.
    pub(crate) const DIFFERS: u32 = 101;
    /// The daemon refuses the VM.
    pub(crate) const REFUSED: u32 = 102;
}

/// An error as the runtime is told it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Failure {
    pub(super) code: u32,
    /// The step that failed, and a remedy.
    pub(super) msg: String,
    /// Cause of the failure.
    pub(super) details: String,
}

impl Failure {
    pub(super) fn new(code: u32, msg: impl Into<String>) -> Self {
        Self {
            code,
            msg: msg.into(),
            details: String::new(),
        }
    }

    /// With the causes of an error as details.
    pub(super) fn because(mut self, e: &dyn Error) -> Self {
        self.details = e.to_string();
        let mut cause = e.source();
        while let Some(e) = cause {
            self.details += &format!(": {e}");
            cause = e.source();
        }
        self
    }

    /// No daemon serves where the attachment is, or is to be.
    pub(super) fn no_daemon() -> Self {
        Self::new(
            code::TRY_AGAIN,
            "no `slipgate serve` runs in the network namespace of the attachment: start it, or \
             give the one it serves as `netns` in the network's configuration",
        )
    }

    /// An answer to another question.
    pub(super) fn another_answer() -> Self {
        Self::new(code::IO, crate::brokers::ANOTHER_ANSWER)
    }

    pub(super) fn to_json(&self, version: &str) -> Value {
        let mut error = json!({"cniVersion": version, "code": self.code, "msg": self.msg});
        if !self.details.is_empty() {
            error["details"] = self.details.as_str().into();
        }
        error
    }
}

/// The guest's place in its network.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Address {
    /// Name of the TAP.
    pub(super) tap: String,
    /// MAC of the guest.
    pub(super) mac: String,
    pub(super) ip: Ipv4Addr,
    /// Largest packet, L3 bytes.
    pub(super) mtu: u32,
    pub(super) network: GuestNetwork,
}

impl Address {
    /// The address with its prefix.
    pub(super) fn cidr(&self) -> String {
        format!("{}/{}", self.ip, self.network.prefix_len)
    }

    /// The result of ADD. The first interface is the guest's, which exists inside of the VM alone;
    /// its sandbox is the container's id. The second one is the TAP; its sandbox is the path of the
    /// network namespace. firecracker-go-sdk's `vmconf` finds them by that.
    pub(super) fn to_result(
        &self,
        version: &str,
        name: &str,
        container: &str,
        sandbox: &str,
    ) -> Value {
        let gateway = self.network.gateway;
        let mut guest = json!({"name": name, "mac": self.mac, "sandbox": container});
        let mut tap = json!({"name": self.tap, "sandbox": sandbox});
        if version == "1.1.0" {
            for interface in [&mut guest, &mut tap] {
                interface["mtu"] = self.mtu.into();
            }
        }
        let mut ip = json!({"interface": 0, "address": self.cidr(), "gateway": gateway});
        if version.starts_with("0.") {
            ip["version"] = "4".into();
        }
        json!({
            "cniVersion": version,
            "interfaces": [guest, tap],
            "ips": [ip],
            "routes": [{"dst": "0.0.0.0/0", "gw": gateway}],
            "dns": {"nameservers": [self.network.dns]},
        })
    }
}
