"""Every family of schedulers, each through a loop over a tiny UNet."""

from __future__ import annotations

import inspect
from typing import Any

import diffusers

from .pieces import text_features, unet
from .registry import CASES, Place, Results, host, noise, seeded
from .stable import BETAS

_FLOW: dict[str, Any] = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}

SCHEDULERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddim": ("DDIMScheduler", {"clip_sample": False, "steps_offset": 1, **BETAS}),
    "ddpm": ("DDPMScheduler", {"clip_sample": False, **BETAS}),
    "ddpm-learned": ("DDPMScheduler", {"variance_type": "fixed_large", "timestep_spacing": "trailing"}),
    "pndm": ("PNDMScheduler", {"skip_prk_steps": True, **BETAS}),
    "pndm-prk": ("PNDMScheduler", {"skip_prk_steps": False, **BETAS}),
    "lms": ("LMSDiscreteScheduler", BETAS),
    "euler": ("EulerDiscreteScheduler", BETAS),
    "euler-karras": ("EulerDiscreteScheduler", {"use_karras_sigmas": True, "timestep_type": "continuous", **BETAS}),
    "euler-ancestral": ("EulerAncestralDiscreteScheduler", BETAS),
    "heun": ("HeunDiscreteScheduler", BETAS),
    "dpm++": ("DPMSolverMultistepScheduler", BETAS),
    "dpm++-sde": ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++", "use_karras_sigmas": True}),
    "dpm++-third": ("DPMSolverMultistepScheduler", {"solver_order": 3, "thresholding": False, **BETAS}),
    "dpm-single": ("DPMSolverSinglestepScheduler", BETAS),
    "kdpm2": ("KDPM2DiscreteScheduler", BETAS),
    "kdpm2-ancestral": ("KDPM2AncestralDiscreteScheduler", BETAS),
    "deis": ("DEISMultistepScheduler", BETAS),
    "unipc": ("UniPCMultistepScheduler", BETAS),
    "unipc-flow": ("UniPCMultistepScheduler", {"flow_shift": 3.0, **_FLOW}),
    "sa-solver": ("SASolverScheduler", BETAS),
    "lcm": ("LCMScheduler", {"original_inference_steps": 50, **BETAS}),
    "tcd": ("TCDScheduler", {"original_inference_steps": 50, **BETAS}),
    "edm-euler": ("EDMEulerScheduler", {}),
    "edm-dpm++": ("EDMDPMSolverMultistepScheduler", {}),
    "ipndm": ("IPNDMScheduler", {}),
    "flow-euler": ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
    "flow-euler-stochastic": ("FlowMatchEulerDiscreteScheduler", {"stochastic_sampling": True}),
    "flow-heun": ("FlowMatchHeunDiscreteScheduler", {"shift": 3.0}),
    "flow-lcm": ("FlowMatchLCMScheduler", {"shift": 3.0}),
    "flow-dpm++": ("DPMSolverMultistepScheduler", {"flow_shift": 3.0, **_FLOW}),
    "consistency": ("CMStochasticIterativeScheduler", {}),
}

_STEPS = 5


def loop(place: Place, name: str) -> Results:
    """Latents after every step, as a denoising loop makes them."""
    cls, config = SCHEDULERS[name]
    scheduler = getattr(diffusers, cls)(**config)
    model, text = place.put(unet()), place.put(text_features(count=2))
    scheduler.set_timesteps(_STEPS, device=place.device)
    latents = place.put(noise(2, 4, 8, 8)) * getattr(scheduler, "init_noise_sigma", 1)
    draws = "generator" in inspect.signature(scheduler.step).parameters
    more: dict[str, Any] = {"generator": seeded(7)} if draws else {}
    seen = []
    for t in scheduler.timesteps:
        scaled = scheduler.scale_model_input(latents, t) if hasattr(scheduler, "scale_model_input") else latents
        predicted = model(scaled, t, encoder_hidden_states=text).sample
        latents = scheduler.step(predicted, t, latents, **more).prev_sample
        seen.append(latents)
        place.step_ended()
    return [host(x) for x in seen]


def _register(name: str) -> None:
    def run(place: Place) -> Results:
        return loop(place, name)

    CASES[f"scheduler-{name}"] = run


for _name in SCHEDULERS:
    _register(_name)
