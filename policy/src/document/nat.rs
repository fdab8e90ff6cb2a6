//! `[nat]`: how translated ports behave toward the world.
use super::{error::ConfigError, file::PolicyFile, schema};
use crate::{Mapping, NatBehaviour, NatSettings};

/// Returns the settings of a policy in a file.
///
/// # Errors
/// A filtering, or hairpinning, is given for ports that only the destination of their flow may send
/// to anyway.
pub(super) fn of_file(file: &PolicyFile, said: &schema::Nat) -> Result<NatSettings, ConfigError> {
    Ok(NatSettings {
        udp: of_protocol(file, &said.udp)?,
        tcp: of_protocol(file, &said.tcp)?,
    })
}

fn of_protocol(
    file: &PolicyFile,
    said: &schema::NatOfProtocol,
) -> Result<NatBehaviour, ConfigError> {
    let mapping = said.mapping.unwrap_or_default();
    let filtering = said.filtering.as_ref();
    if let Some(filtering) = filtering
        && mapping != Mapping::EndpointIndependent
        && filtering.get_ref().lets_others_in()
    {
        let problem = format!(
            "{} filtering needs a port that does not depend on the destination",
            filtering.get_ref().name()
        );
        let remedy = "write mapping = \"endpoint-independent\" beside it";
        return Err(file.error(&filtering.span(), problem, remedy));
    }
    let is_mapped = mapping == Mapping::EndpointIndependent;
    if let Some(hairpin) = &said.hairpin
        && *hairpin.get_ref()
        && !is_mapped
    {
        let problem = "hairpinning needs a port that does not depend on the destination";
        let remedy = "write mapping = \"endpoint-independent\" beside it";
        return Err(file.error(&hairpin.span(), problem, remedy));
    }
    Ok(NatBehaviour {
        mapping,
        filtering: filtering.map(|said| *said.get_ref()).unwrap_or_default(),
        hairpin: (said.hairpin.as_ref()).map_or(is_mapped, |said| *said.get_ref()),
    })
}
