//! The VM's interrupt lines (GSIs): the pins of the IOAPIC and PICs, and one line per MSI-X vector,
//! raised by an eventfd (irqfd).
//!
//! KVM takes the routing table as a whole (`KVM_SET_GSI_ROUTING`), so one lock covers the table and
//! the call that sets it: two vCPUs that program two vectors at once must not lose one.
use std::{collections::BTreeMap, io, sync::Arc, sync::Mutex};

use kvm_bindings::{
    KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQ_ROUTING_MSI, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER,
    KVM_IRQCHIP_PIC_SLAVE, KvmIrqRouting, kvm_irq_routing_entry,
};
use kvm_ioctls::VmFd;
use vmm_sys_util::eventfd::EventFd;

use crate::interrupt::{MsiFabric, MsiMessage};

/// Number of IOAPIC pins. Lines below it are pins.
const IOAPIC_PINS: u32 = 24;
/// Number of those pins that are also a PIC's.
const PIC_PINS: u32 = 16;
const PINS_PER_PIC: u32 = 8;
/// Largest number of MSI lines: `KVM_MAX_IRQ_ROUTES` of x86, less the pins' own routes.
const MAX_MSI_LINES: u32 = 4096 - IOAPIC_PINS - PIC_PINS;

/// Implements [`MsiFabric`] with irqfds and the VM's routing table.
pub(crate) struct GsiRoutes {
    vm: Arc<VmFd>,
    lines: Mutex<Lines>,
}

/// The connected lines and the message of each; `None` before its first route.
#[derive(Default)]
struct Lines {
    routes: BTreeMap<u32, Option<MsiMessage>>,
    /// Whether KVM is told later.
    is_deferred: bool,
}

impl GsiRoutes {
    /// Returns the table as `KVM_CREATE_IRQCHIP` leaves it: the pins, no MSI.
    pub(crate) fn new(vm: Arc<VmFd>) -> Self {
        Self {
            vm,
            lines: Mutex::default(),
        }
    }

    /// Connects `signal` to a pin of the IOAPIC (and PIC): each signal is an edge.
    pub(crate) fn connect_pin(&self, pin: u32, signal: &EventFd) -> io::Result<()> {
        debug_assert!(pin < IOAPIC_PINS);
        Ok(self.vm.register_irqfd(signal, pin)?)
    }

    /// Sets all routes that `set` sets by one call: each waits for a grace period in the kernel.
    ///
    /// # Errors
    /// KVM refuses a route.
    pub(crate) fn at_once<T>(&self, set: impl FnOnce() -> T) -> io::Result<T> {
        let defer = |is_deferred| {
            let mut lines = self.lines.lock().expect("no holder panics");
            lines.is_deferred = is_deferred;
            lines
        };
        drop(defer(true));
        let done = set();
        let lines = defer(false);
        self.commit(&lines.routes)?;
        Ok(done)
    }

    /// Sets the whole table in KVM. The lock on `lines` must be held.
    fn commit(&self, lines: &BTreeMap<u32, Option<MsiMessage>>) -> io::Result<()> {
        let routes = KvmIrqRouting::from_entries(&entries(lines)).map_err(|error| {
            io::Error::other(format!("a table of {} MSI routes: {error:?}", lines.len()))
        })?;
        Ok(self.vm.set_gsi_routing(&routes)?)
    }
}

impl MsiFabric for GsiRoutes {
    fn connect(&self, signal: &EventFd) -> io::Result<u32> {
        let mut lines = self.lines.lock().expect("no holder panics");
        let gsi = first_free(&lines.routes).ok_or_else(|| {
            io::Error::other(format!("all {MAX_MSI_LINES} interrupt lines are taken"))
        })?;
        // Without a route, KVM drops the signal.
        self.vm.register_irqfd(signal, gsi)?;
        lines.routes.insert(gsi, None);
        Ok(gsi)
    }

    fn route(&self, gsi: u32, message: MsiMessage) -> io::Result<()> {
        let mut lines = self.lines.lock().expect("no holder panics");
        let before = *lines.routes.get(&gsi).ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::NotFound,
                format!("interrupt line {gsi} is not connected"),
            )
        })?;
        // The call waits for a grace period in the kernel, so a call without a change is skipped.
        if before == Some(message) {
            return Ok(());
        }
        lines.routes.insert(gsi, Some(message));
        if lines.is_deferred {
            return Ok(());
        }
        self.commit(&lines.routes).inspect_err(|_| {
            lines.routes.insert(gsi, before);
        })
    }

    fn set_held(&self, gsi: u32, signal: &EventFd, is_held: bool) -> io::Result<()> {
        if is_held {
            return Ok(self.vm.unregister_irqfd(signal, gsi)?);
        }
        // KVM looks whether the eventfd was signalled already when it gets it, but does not read it
        // then: it would be taken for signalled at the next hold. So what was kept is signalled anew;
        // what comes in between is one interrupt more, at the worst.
        let was_signalled = signal.read().is_ok();
        let registered = self.vm.register_irqfd(signal, gsi);
        if was_signalled {
            // A count that was just read is not at its limit. What no line has is kept.
            let _ = signal.write(1);
        }
        Ok(registered?)
    }

    fn disconnect(&self, gsi: u32, signal: &EventFd) {
        let mut lines = self.lines.lock().expect("no holder panics");
        if let Some(route) = lines.routes.remove(&gsi) {
            // Either call can fail only on a line that does not exist: then there is nothing to
            // undo.
            let _ = self.vm.unregister_irqfd(signal, gsi);
            if route.is_some() {
                let _ = self.commit(&lines.routes);
            }
        }
    }
}

fn first_free(lines: &BTreeMap<u32, Option<MsiMessage>>) -> Option<u32> {
    (IOAPIC_PINS..IOAPIC_PINS + MAX_MSI_LINES).find(|gsi| !lines.contains_key(gsi))
}

/// Returns the routing table: the pins' routes as KVM sets them up itself
/// (`arch/x86/kvm/irq_comm.c`, `default_routing`), then the MSIs.
fn entries(lines: &BTreeMap<u32, Option<MsiMessage>>) -> Vec<kvm_irq_routing_entry> {
    let mut entries = Vec::with_capacity((IOAPIC_PINS + PIC_PINS) as usize + lines.len());
    for pin in 0..IOAPIC_PINS {
        entries.push(pin_entry(pin, KVM_IRQCHIP_IOAPIC, pin));
        if pin < PIC_PINS {
            let chip = match pin / PINS_PER_PIC {
                0 => KVM_IRQCHIP_PIC_MASTER,
                _ => KVM_IRQCHIP_PIC_SLAVE,
            };
            entries.push(pin_entry(pin, chip, pin % PINS_PER_PIC));
        }
    }
    let routed = lines
        .iter()
        .filter_map(|(&gsi, route)| Some((gsi, (*route)?)));
    entries.extend(routed.map(|(gsi, message)| msi_entry(gsi, message)));
    entries
}

fn pin_entry(gsi: u32, irqchip: u32, pin: u32) -> kvm_irq_routing_entry {
    let mut entry = kvm_irq_routing_entry {
        gsi,
        type_: KVM_IRQ_ROUTING_IRQCHIP,
        ..Default::default()
    };
    entry.u.irqchip.irqchip = irqchip;
    entry.u.irqchip.pin = pin;
    entry
}

fn msi_entry(gsi: u32, message: MsiMessage) -> kvm_irq_routing_entry {
    let mut entry = kvm_irq_routing_entry {
        gsi,
        type_: KVM_IRQ_ROUTING_MSI,
        ..Default::default()
    };
    entry.u.msi.address_lo = message.address as u32;
    entry.u.msi.address_hi = (message.address >> 32) as u32;
    entry.u.msi.data = message.data;
    entry
}

#[cfg(test)]
#[path = "routes_test.rs"]
mod tests;
