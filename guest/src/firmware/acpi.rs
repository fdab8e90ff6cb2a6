//! Reads the ACPI tables that the guest needs: the CPUs (MADT), the address of PCI's configuration
//! space (MCFG), the write that powers the machine off (FADT, DSDT), and the address of the VM's
//! generation id (DSDT).
use super::PhysicalMemory;

/// Largest number of CPUs in the list.
pub const CPU_LIMIT: usize = 32;

/// Contents of the tables. They are kept without a heap, because the tables may lie where the heap
/// will be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tables {
    apic_ids: [u32; CPU_LIMIT],
    cpus: usize,
    /// Physical address of bus 0's enhanced configuration space; `None` without one.
    pub ecam: Option<u64>,
    /// How the machine is powered off; `None` if the tables do not say.
    pub power_off: Option<PowerOff>,
    /// Physical address of the VM's generation id, 16 bytes; `None` if the tables do not say.
    pub generation_id: Option<u64>,
}

/// Write that puts the machine into the sleep state S5, off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PowerOff {
    /// Register to write to.
    pub register: Register,
    /// Value to write to the register.
    pub value: u16,
}

/// Register by which a machine enters a sleep state (ACPI 6.5, 4.8.3.2.1 and 4.8.3.7).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Register {
    /// SLEEP_CONTROL_REG, an I/O port of one byte.
    SleepPort(u16),
    /// SLEEP_CONTROL_REG, a byte at a physical address.
    SleepMemory(u64),
    /// PM1a_CNT, an I/O port of two bytes.
    Pm1Control(u16),
}

impl Tables {
    /// Returns the local APIC ids of the usable CPUs, in the tables' order.
    pub fn apic_ids(&self) -> &[u32] {
        &self.apic_ids[..self.cpus]
    }

    fn add_cpu(&mut self, apic_id: u64, flags: u64) {
        const ENABLED: u64 = 1;
        if flags & ENABLED != 0 && self.cpus < CPU_LIMIT {
            self.apic_ids[self.cpus] = apic_id as u32;
            self.cpus += 1;
        }
    }
}

/// Reads the tables from the root pointer at `rsdp`. With 0, the root pointer is searched for where
/// a PC's firmware puts it.
///
/// # Errors
/// A table is missing, lies outside memory, or is malformed.
pub fn read<M: PhysicalMemory>(memory: &M, rsdp: u64) -> Result<Tables, &'static str> {
    let rsdp = if rsdp == 0 {
        find_root(memory).ok_or("no ACPI root pointer")?
    } else {
        rsdp
    };
    if memory.bytes(rsdp, 8) != Some(b"RSD PTR ") {
        return Err("no ACPI root pointer where it was said to be");
    }
    let revision = memory.integer::<1>(rsdp + 15);
    let xsdt = memory
        .integer::<8>(rsdp + 24)
        .filter(|xsdt| revision >= Some(2) && *xsdt != 0);
    let rsdt = memory.integer::<4>(rsdp + 16);
    let (root, width) = match xsdt {
        Some(xsdt) => (xsdt, 8),
        None => (rsdt.ok_or("the ACPI root pointer is outside memory")?, 4),
    };
    let mut tables = Tables::default();
    for at in (36..table_length(memory, root)?).step_by(width) {
        let entry = root + at as u64;
        let address = if width == 8 {
            memory.integer::<8>(entry)
        } else {
            memory.integer::<4>(entry)
        };
        let address = address.ok_or("an ACPI table is outside memory")?;
        match memory.bytes(address, 4) {
            Some(b"APIC") => read_madt(memory, address, &mut tables)?,
            // One entry per segment and range of buses: the first is segment 0's.
            Some(b"MCFG") if table_length(memory, address)? >= 60 => {
                tables.ecam = memory.integer::<8>(address + 44);
            }
            Some(b"FACP") => {
                tables.power_off = power_off(memory, address);
                tables.generation_id = dsdt_of(memory, address).and_then(generation_id);
            }
            _ => {}
        }
    }
    Ok(tables)
}

fn read_madt<M: PhysicalMemory>(
    memory: &M,
    madt: u64,
    tables: &mut Tables,
) -> Result<(), &'static str> {
    const LOCAL_APIC: u64 = 0;
    const LOCAL_X2APIC: u64 = 9;
    let end = madt + table_length(memory, madt)? as u64;
    let mut at = madt + 44;
    while at + 2 <= end {
        let kind = memory.integer::<1>(at).unwrap_or(0);
        let length = memory.integer::<1>(at + 1).unwrap_or(0);
        match (kind, length) {
            (_, 0..2) => return Err("the MADT has an entry without a length"),
            (LOCAL_APIC, 8..) => tables.add_cpu(
                memory.integer::<1>(at + 3).unwrap_or(0),
                memory.integer::<4>(at + 4).unwrap_or(0),
            ),
            (LOCAL_X2APIC, 16..) => tables.add_cpu(
                memory.integer::<4>(at + 4).unwrap_or(0),
                memory.integer::<4>(at + 8).unwrap_or(0),
            ),
            _ => {}
        }
        at += length;
    }
    Ok(())
}

/// Returns how the machine is powered off, by its FADT; `None` if the FADT names no register that
/// we can write, or the DSDT has no `_S5`.
fn power_off<M: PhysicalMemory>(memory: &M, fadt: u64) -> Option<PowerOff> {
    const HARDWARE_REDUCED: u64 = 1 << 20;
    let length = table_length(memory, fadt).ok()?;
    let field = |offset: usize, width: usize| match (offset + width <= length, width) {
        (true, 4) => memory.integer::<4>(fadt + offset as u64),
        (true, 8) => memory.integer::<8>(fadt + offset as u64),
        _ => None,
    };
    let sleep_type = sleep_type_s5(dsdt_of(memory, fadt)?)?;
    // A generic address: its space (0 memory, 1 I/O) in the first byte, the address in the last 8.
    let sleep_control = field(248, 8).filter(|address| *address != 0);
    let pm1_control = field(64, 4)?;
    let register = if field(112, 4)? & HARDWARE_REDUCED == 0 && pm1_control != 0 {
        Register::Pm1Control(pm1_control as u16)
    } else {
        match field(244, 4)? & 0xFF {
            0 => Register::SleepMemory(sleep_control?),
            1 => Register::SleepPort(sleep_control? as u16),
            _ => return None,
        }
    };
    // SLP_TYP and SLP_EN.
    let value = match register {
        Register::Pm1Control(_) => sleep_type << 10 | 1 << 13,
        Register::SleepPort(_) | Register::SleepMemory(_) => sleep_type << 2 | 1 << 5,
    };
    Some(PowerOff { register, value })
}

/// Returns the contents of the DSDT that a FADT names.
fn dsdt_of<M: PhysicalMemory>(memory: &M, fadt: u64) -> Option<&[u8]> {
    let length = table_length(memory, fadt).ok()?;
    let wide = (length >= 148).then(|| memory.integer::<8>(fadt + 140));
    let wide = wide.flatten().filter(|dsdt| *dsdt != 0);
    let narrow = (length >= 44).then(|| memory.integer::<4>(fadt + 40));
    let dsdt = wide.or(narrow.flatten())?;
    memory.bytes(dsdt, table_length(memory, dsdt).ok()?)
}

/// Returns the elements of the package of a name in a DSDT, behind their number. No AML is executed: the
/// name and the package are constants next to each other in every firmware.
fn package_of<'m>(aml: &'m [u8], name: &[u8]) -> Option<&'m [u8]> {
    /// Operator that begins a package.
    const PACKAGE: u8 = 0x12;
    let mut places = aml.windows(name.len() + 1);
    let at = places.position(|window| window.strip_prefix(name) == Some(&[PACKAGE]))?;
    let package = &aml[at + name.len() + 1..];
    // The upper two bits of the length's first byte count its further bytes. Then comes the number
    // of elements.
    package.get(usize::from(package.first()? >> 6) + 2..)
}

/// Returns the address in the package `ADDR` of the generation id's device, whose lower half is its first
/// element. A device with a method of this name, as QEMU's, is not found.
fn generation_id(aml: &[u8]) -> Option<u64> {
    const DEVICE: &[u8] = b"VM_Gen_Counter";
    let at = aml
        .windows(DEVICE.len())
        .position(|window| window == DEVICE)?;
    let (low, rest) = integer(package_of(&aml[at..], b"ADDR")?)?;
    let (high, _) = integer(rest)?;
    Some(high << 32 | low)
}

/// Returns the integer constant at the start of AML, and what is behind it.
fn integer(aml: &[u8]) -> Option<(u64, &[u8])> {
    let (kind, rest) = aml.split_first()?;
    let length = match kind {
        0 | 1 => return Some((u64::from(*kind), rest)),
        0x0A => 1,
        0x0B => 2,
        0x0C => 4,
        0x0E => 8,
        _ => return None,
    };
    let mut bytes = [0; 8];
    bytes[..length].copy_from_slice(rest.get(..length)?);
    Some((u64::from_le_bytes(bytes), &rest[length..]))
}

/// Returns the first element of the package `_S5` in a DSDT.
fn sleep_type_s5(aml: &[u8]) -> Option<u16> {
    let (value, _) = integer(package_of(aml, b"_S5_")?)?;
    u16::try_from(value).ok().filter(|value| *value < 8)
}

fn table_length<M: PhysicalMemory>(memory: &M, table: u64) -> Result<usize, &'static str> {
    let length = memory
        .integer::<4>(table + 4)
        .ok_or("an ACPI table is outside memory")? as usize;
    memory
        .bytes(table, length)
        .map(<[u8]>::len)
        .ok_or("an ACPI table ends outside memory")
}

fn find_root<M: PhysicalMemory>(memory: &M) -> Option<u64> {
    (0xE_0000..0x10_0000)
        .step_by(16)
        .find(|at| memory.bytes(*at, 8) == Some(b"RSD PTR "))
}

#[cfg(test)]
#[path = "acpi_test.rs"]
mod tests;
