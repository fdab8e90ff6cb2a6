//! Settings of a TAP that serving it changes, so that a start that fails can put them back.

use crate::{Result, device::Device};

/// Settings of a TAP that [`crate::serve::serve_tap`] and who calls it change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TapSettings {
    up: bool,
    mtu: u32,
    /// `None`: the kernel has no such sysctl.
    forwarding: Option<bool>,
    ipv6_disabled: Option<bool>,
}

impl TapSettings {
    /// Reads them.
    ///
    /// # Errors
    /// The device is gone.
    pub fn of(tap: &Device) -> Result<Self> {
        Ok(Self {
            up: tap.flags()? & libc::IFF_UP != 0,
            mtu: tap.mtu()?,
            forwarding: tap.read_sysctl("ipv4", "forwarding"),
            ipv6_disabled: tap.read_sysctl("ipv6", "disable_ipv6"),
        })
    }

    /// Returns them for a TAP that is to stay down: one whose guest was served must not reach the host's
    /// own stack once it has no program.
    #[must_use]
    pub fn down(self) -> Self {
        Self { up: false, ..self }
    }

    /// Sets them again, for a TAP without a program. Routes and addresses that the kernel removed
    /// while it was down do not come back.
    ///
    /// # Errors
    /// The kernel refuses one of them; those before it are set.
    pub fn restore(&self, tap: &Device) -> Result<()> {
        if let Some(forwarding) = self.forwarding {
            tap.set_forwarding(forwarding)?;
        }
        if let Some(disabled) = self.ipv6_disabled {
            tap.write_sysctl("ipv6", "disable_ipv6", disabled)?;
        }
        if tap.mtu()? != self.mtu {
            tap.set_mtu(self.mtu)?;
        }
        tap.set_up(self.up)
    }
}

#[cfg(test)]
#[path = "tap_settings_test.rs"]
mod tests;
