"""Chat templates that read conversations as those of the supported families do, each in its own words."""

_CONTENT = """\
{%- macro written(content) %}
{%- if content is string %}{{- content }}
{%- else %}{%- for part in content or [] %}
{%- if 'text' in part %}{{- part.text }}
{%- elif part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- else %}{{- '<|vision_start|><|video_pad|><|vision_end|>' }}{%- endif %}{%- endfor %}{%- endif %}
{%- endmacro %}
"""
# Qwen2-VL and Qwen2.5-VL: a system message by default, no tools.
SECOND = (
    _CONTENT
    + """\
{%- for message in messages %}
{%- if loop.first and message.role != 'system' %}{{- '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + written(message.content) + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
)
_THOUGHT = """\
{%- set thought = message.reasoning_content or '' %}
{%- if not thought and '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
"""
_RESULT = """\
{%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
"""
# Qwen3-VL: tools in Hermes' format, results of tools in a user's message.
THIRD = (
    _CONTENT
    + """\
{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- written(messages[0].content) + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n<tools>' }}{%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\nas <tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + written(messages[0].content) + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}{%- set content = written(message.content) %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
"""
    + _THOUGHT
    + """\
{{- '<|im_start|>assistant\\n' }}
{%- if thought and loop.last %}{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif %}
{{- content }}
{%- for call in message.tool_calls %}
{%- if content or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{%- if call.function.arguments is string %}{{- call.function.arguments }}
{%- else %}{{- call.function.arguments | tojson }}{%- endif %}
{{- '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
"""
    + _RESULT
    + """\
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
)
# Qwen3.5: texts are trimmed, one system message, calls as XML, a thought is opened.
THIRD_5 = (
    _CONTENT
    + """\
{%- set last = namespace(query=-1) %}
{%- for message in messages %}{%- set content = written(message.content) | trim %}
{%- set is_result = content.startswith('<tool_response>') and content.endswith('</tool_response>') %}
{%- if message.role == 'user' and not is_result %}
{%- set last.query = loop.index0 %}{%- endif %}{%- endfor %}
{%- if last.query < 0 %}{{- raise_exception('No user query found in messages.') }}{%- endif %}
{%- for message in messages %}{%- set content = written(message.content) | trim %}
{%- if message.role == 'system' %}
{%- if not loop.first %}{{- raise_exception('System message must be at the beginning.') }}{%- endif %}
{{- '<|im_start|>system\\n' + content + '<|im_end|>\\n' }}
{%- elif message.role == 'user' %}{{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
"""
    + _THOUGHT
    + """\
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > last.query %}{{- '<think>\\n' + thought | trim + '\\n</think>\\n\\n' }}{%- endif %}{{- content }}
{%- for call in message.tool_calls %}{{- '\\n\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for name, given in call.function.arguments | items %}{{- '<parameter=' + name + '>\\n' }}
{{- given if given is string else given | tojson }}{{- '\\n</parameter>\\n' }}{%- endfor %}
{{- '</function>\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
"""
    + _RESULT
    + """\
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '\\n</think>\\n\\n' }}{%- endif %}{%- endif %}
"""
)
